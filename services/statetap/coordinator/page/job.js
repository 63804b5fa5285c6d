// One job: how it stands, what holds it up, what went wrong by row, and what to do with its files.

import { ask, poll, watch } from "./api.js";
import { h, Keyed, show, table, text } from "./dom.js";
import { BOUNDS, bytes, count, duration, PAUSES, percent, short, time, words } from "./format.js";
import { actions, ENDED, notice, progress, stateLabel } from "./parts.js";

const ERRORS = 50; // rows a page
const ERRORS_MS = 10000;
const POINTS = 300; // of the speed, the newest ones: one a second, five minutes

export function jobView(main, line, jobId, mayWrite) {
  const trouble = notice("failed");
  const title = h("h1", { tabindex: "-1" }, jobId);
  const state = stateLabel();
  const why = notice();
  const bar = progress();
  const rows = h("p", {});
  const speed = speedLine();
  const cards = facts("cards", ["Tokens a second", "Rows a second", "Written a second", "Time left", "Held up by", "On the store", "Batches out"]);
  const errors = errorRows(jobId, (error) => trouble.fail(error));
  const about = facts("facts", ["Dataset", "Captured", "Engine profile", "Tokens", "Bytes", "Reused rows", "Submitted", "Started", "Ended", "Folder", "Samples", "Captured by"]);
  const next = h("div", { hidden: true });
  let stop = () => {};
  let over = false;
  let gone = false;

  const acts = actions(jobId, mayWrite, (job) => { trouble.say(""); update(job); }, (error) => trouble.fail(error));
  const known = h(
    "div",
    { hidden: true },
    h("p", {}, state.element), why.element, acts.element,
    h("div", { class: "big" }, bar.element), rows, cards.element, speed.element,
    errors.element, next, h("h2", {}, "About it"), about.element,
  );
  main.replaceChildren(h("p", {}, h("a", { href: "#/" }, "← Overview")), title, h("p", { class: "mono dim" }, jobId), trouble.element, known);

  let version = -1;
  const update = (job) => {
    if (job.version < version) return;
    version = job.version;
    show(known, true);
    text(title, job.name || job.job_id);
    document.title = `${percent(job.rows.total - job.rows.open, job.rows.total)} ${job.name || job.job_id} · Statetap`;
    state.update(job.state);
    why.element.className = job.state === "failed" ? "note failed" : "note";
    const reason = [words(job.reason), job.message].filter(Boolean).join(": ");
    why.say([reason, job.state === "paused" ? PAUSES[job.reason] : ""].filter(Boolean).join(" — "));
    acts.update(job);
    bar.update(job.rows);
    const { done, failed, skipped, open, total } = job.rows;
    text(rows, `${count(done)} done + ${count(failed)} failed + ${count(skipped)} skipped + ${count(open)} open = ${count(total)} rows`);
    const ended = ENDED.has(job.state);
    cards.update({
      "Tokens a second": ended ? "" : short(job.rates.tokens_per_s),
      "Rows a second": ended ? "" : short(job.rates.rows_per_s),
      "Written a second": ended ? "" : bytes(job.rates.bytes_per_s),
      "Time left": ended || job.eta_s === null ? "" : duration(job.eta_s),
      "Held up by": BOUNDS[job.bound] ?? "",
      "On the store": `${bytes(job.bytes.committed)} of ${bytes(job.bytes.expected)}`,
      "Batches out": ended ? "" : `${count(job.batches.outstanding)}, ${count(job.batches.finished)} of ${count(job.batches.total)} finished`,
    });
    show(speed.element, !ended);
    if (!ended) speed.add(job.rates.tokens_per_s);
    errors.counts(job.errors);
    about.update({
      "Dataset": job.dataset_id,
      "Captured": `boundaries ${job.boundaries.join(", ")}, ${job.encoding}, positions ${job.positions}`,
      "Engine profile": job.profile_id,
      "Tokens": `${count(job.tokens.done)} of ${count(job.tokens.total)}`,
      "Bytes": `${count(job.bytes.committed)} committed${job.bytes.freed ? `, ${count(job.bytes.freed)} freed when they were read` : ""}`,
      "Reused rows": job.rows.reused ? `${count(job.rows.reused)} taken from earlier jobs` : "",
      "Submitted": time(job.created_at),
      "Started": job.started_at === null ? "" : time(job.started_at),
      "Ended": job.ended_at === null ? "" : `${time(job.ended_at)}${job.started_at === null ? "" : ` (after ${duration(job.ended_at - job.started_at)})`}`,
      "Folder": job.path,
      "Samples": job.samples ?? "",
      "Captured by": job.engines.map((e) => `${e.engine_id}${e.sglang_version && `, SGLang ${e.sglang_version}`}: ${count(e.rows)} rows`).join("; "),
    });
    const usable = job.state.startsWith("completed");
    if (usable && next.hidden) next.replaceChildren(...commands(job.path));
    show(next, usable);
    if (ended !== over) {
      over = ended;
      stop();
      stop = () => {};
      if (!ended) follow(); // it was retried
    }
  };

  const follow = () => {
    stop = watch(`v1/jobs/${jobId}/events`, update, line);
  };
  const stopPolling = poll(ERRORS_MS, async () => {
    // The stream ends with the job; that somebody retries it, only asking tells.
    if (version < 0 || over) {
      const job = await ask(`v1/jobs/${encodeURIComponent(jobId)}`);
      if (gone) return;
      if (version < 0 && !ENDED.has(job.state)) follow();
      else line(true);
      update(job);
      trouble.say("");
    }
    await errors.refresh();
  }, (error) => trouble.fail(error));
  return () => {
    gone = true;
    stop();
    stopPolling();
  };
}

function facts(kind, names) {
  const parts = new Map(names.map((name) => [name, h("dd")]));
  const blocks = new Map(names.map((name) => [name, h("div", kind === "cards" ? { class: "card" } : {}, h("dt", {}, name), parts.get(name))]));
  const element = h("dl", { class: kind });
  if (kind === "cards") element.append(...blocks.values());
  else for (const block of blocks.values()) element.append(...block.children);
  return {
    element,
    update(values) {
      for (const [name, part] of parts) {
        text(part, values[name]);
        const empty = values[name] === "";
        if (kind === "cards") show(blocks.get(name), !empty);
        else {
          show(part, !empty);
          show(part.previousElementSibling, !empty);
        }
      }
    },
  };
}

/** Tokens a second since the page was opened. */
function speedLine() {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "speed");
  svg.setAttribute("viewBox", `0 0 ${POINTS} 40`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  const points = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  svg.append(points);
  const caption = h("p", { class: "dim" });
  const values = [];
  return {
    element: h("div", { hidden: true }, svg, caption),
    add(value) {
      values.push(value);
      if (values.length > POINTS) values.shift();
      const most = Math.max(...values, 1);
      points.setAttribute("points", values.map((v, i) => `${POINTS - values.length + i},${(39 - (38 * v) / most).toFixed(1)}`).join(" "));
      const told = `tokens a second since this page was opened, up to ${short(most)}`;
      text(caption, told);
      svg.setAttribute("aria-label", told);
    },
  };
}

/** Codes with their numbers, and the rows of the one that was chosen. */
function errorRows(jobId, fail) {
  const codes = h("div", { class: "actions", role: "group", "aria-label": "Error codes" });
  const list = table("Rows that failed or were skipped, in order", [["Row", "n"], ["Where"], ["State"], ["Code"], ["What"], ["Next step"]]);
  const more = h("button", { hidden: true }, "More rows");
  const element = h("section", { hidden: true }, h("h2", {}, "What went wrong"), codes, list.element, more);
  const rows = new Keyed(list.body, (r) => r.row, errorRow);
  let chosen = "";
  let total = 0;
  let shown = ERRORS;
  const choose = (code) => {
    chosen = chosen === code ? "" : code;
    shown = ERRORS;
    buttons.update([...now]);
    refresh().catch(fail);
  };
  let now = [];
  const buttons = new Keyed(codes, ([code]) => code, ([code]) => {
    const made = h("button", { onclick: () => choose(code) });
    return {
      element: made,
      update([, n]) {
        text(made, `${code} ${count(n)}`);
        made.setAttribute("aria-pressed", chosen === code);
      },
    };
  });
  const refresh = async () => {
    if (total === 0) return;
    const found = [];
    let cursor = null;
    do {
      const query = new URLSearchParams({ limit: ERRORS, ...(chosen && { code: chosen }), ...(cursor && { cursor }) });
      const answer = await ask(`v1/jobs/${jobId}/errors?${query}`);
      found.push(...answer.items);
      cursor = answer.next_cursor;
    } while (cursor !== null && found.length < shown);
    rows.update(found);
    show(more, cursor !== null);
  };
  more.addEventListener("click", () => {
    shown += ERRORS;
    refresh().catch(fail);
  });
  return {
    element,
    refresh,
    counts(errors) {
      now = Object.entries(errors).sort((a, b) => b[1] - a[1]);
      const before = total;
      total = now.reduce((sum, [, n]) => sum + n, 0);
      buttons.update(now);
      show(element, total > 0);
      if (before === 0 && total > 0) refresh().catch(fail);
    },
  };
}

function errorRow() {
  const [row, where, state, code, what, next] = ["n", "id", "", "mono", "id", ""].map((c) => h("td", { class: c }));
  return {
    element: h("tr", {}, row, where, state, code, what, next),
    update(error) {
      text(row, String(error.row));
      text(where, [error.file, error.line === null ? "" : `line ${error.line}`, error.source_id].filter(Boolean).join(", "));
      text(state, error.state);
      text(code, error.code);
      text(what, error.message);
      text(next, error.next_step);
    },
  };
}

function commands(path) {
  const quoted = /^[\w./:@-]+$/.test(path) ? path : `'${path.replaceAll("'", "'\\''")}'`;
  return [
    h("h2", {}, "What to do with it"),
    h("p", {}, "Where the store is mounted:"),
    h("pre", {}, `statetap verify ${quoted}\nstatetap export ${quoted} --format specforge --out DIR`),
    h("p", {}, "Or read it as it is: ", h("code", {}, "statetap.store.reader.JobDataset"), "."),
  ];
}
