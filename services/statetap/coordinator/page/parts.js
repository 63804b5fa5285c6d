// What list and job share: a job's state, its progress bar, what may be done to it.

import { ask } from "./api.js";
import { button, confirmed, h, show, text } from "./dom.js";
import { count, percent, words } from "./format.js";

export const ENDED = new Set(["completed", "completed_with_errors", "cancelled", "failed"]);

export function stateLabel() {
  const element = h("span", { class: "state" });
  return {
    element,
    update(state) {
      text(element, words(state));
      element.className = `state s-${state}`;
    },
  };
}

/** Done, failed and skipped rows of all. The numbers stand beside it: colour alone tells nothing to some. */
export function progress() {
  const parts = ["done", "failed", "skipped"].map((name) => h("i", { class: name }));
  const element = h("div", { class: "bar", role: "progressbar", "aria-label": "rows with an outcome", "aria-valuemin": "0" }, ...parts);
  return {
    element,
    update(rows) {
      const values = [rows.done, rows.failed, rows.skipped];
      parts.forEach((part, i) => {
        part.style.width = `${rows.total ? (100 * values[i]) / rows.total : 0}%`;
      });
      const ended = rows.done + rows.failed + rows.skipped;
      element.setAttribute("aria-valuemax", rows.total);
      element.setAttribute("aria-valuenow", ended);
      element.setAttribute("aria-valuetext", `${count(ended)} of ${count(rows.total)} rows, ${percent(ended, rows.total)}`);
    },
  };
}

/** Buttons of a job; those that its state does not allow are not shown, and none is to a key that may only read. */
export function actions(jobId, mayWrite, done, fail) {
  const post = (what, body) => async () => done(await ask(`v1/jobs/${jobId}/${what}`, { method: "POST", body }));
  const pause = button("Pause", post("pause"), fail);
  const resume = button("Resume", post("resume"), fail);
  const retry = button("Retry failed rows", post("retry", {}), fail);
  const cancel = button("Cancel", async () => {
    const question = "Cancel this job? What is done stays on the store; the rest is not prefilled, and the job cannot be resumed.";
    if (await confirmed(question, "Cancel the job")) await post("cancel")();
  }, fail, { class: "danger" });
  const element = h("div", { class: "actions" }, pause, resume, retry, cancel);
  return {
    element,
    update(job) {
      const ended = ENDED.has(job.state);
      show(pause, mayWrite && !ended && job.control === "run");
      show(resume, mayWrite && !ended && (job.control === "pause" || job.state === "paused"));
      show(retry, mayWrite && job.rows.failed > 0 && (ended || job.reason === "circuit_open") && job.state !== "cancelled");
      show(cancel, mayWrite && !ended && job.control !== "cancel");
    },
  };
}

export function notice(kind = "") {
  const element = h("p", { class: `note ${kind}`, role: "alert", hidden: true });
  return {
    element,
    say(message) {
      text(element, message);
      show(element, Boolean(message));
    },
    fail(error) {
      this.say(`${error.message}${error.nextStep ? ` — ${error.nextStep}` : ""}`);
    },
  };
}
