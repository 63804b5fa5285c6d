// All jobs, engines and datasets.

import { ask, poll, watch } from "./api.js";
import { h, Keyed, show, table, text } from "./dom.js";
import { bytes, count, duration, percent, short, time } from "./format.js";
import { ENDED, notice, progress, stateLabel } from "./parts.js";

const PAGE = 50;
const SLOW_MS = 10000; // what came, changed or went without an event: deleted jobs
const FAST_MS = 3000;

export function overview(main, line) {
  const trouble = notice("failed");
  const jobs = table("Jobs, newest first", [
    ["Job"], ["State"], ["Rows"], ["Failed", "n"], ["Skipped", "n"], ["Tokens/s", "n"], ["Time left", "n"], ["On the store", "n"], ["Submitted"],
  ]);
  const noJobs = h("p", { class: "dim", hidden: true }, "No job yet. Submit one: ", h("code", {}, "statetap submit data.jsonl --watch"), ", or by ", h("a", { href: "docs" }, "the API"), ".");
  const more = h("button", { hidden: true }, "Older jobs");
  const store = h("p", { class: "dim" });
  const engines = table("Engines that answered in the last seconds", [["Engine"], ["State"], ["Model"], ["Boundaries"], ["Workers", "n"], ["SGLang"], ["Profile"]]);
  const noEngines = h("p", { class: "note", hidden: true }, "No engine is live: jobs wait. Start one with statetap up, or look at the engine's log.");
  const datasets = table("Datasets, newest first", [["Dataset"], ["State"], ["Accepted", "n"], ["Rejected", "n"], ["Tokens", "n"], ["Longest", "n"], ["Made"]]);
  const noDatasets = h("p", { class: "dim", hidden: true }, "No dataset yet.");
  main.replaceChildren(
    h("h1", { tabindex: "-1" }, "Overview"), store, trouble.element,
    h("h2", {}, "Jobs"), jobs.element, noJobs, more,
    h("h2", {}, "Engines"), engines.element, noEngines,
    h("h2", {}, "Datasets"), datasets.element, noDatasets,
  );

  const known = new Map();
  const heard = new Map(); // when something was last heard of it
  const rows = new Keyed(jobs.body, (job) => job.job_id, jobRow);
  let pages = 1;
  let older = null;
  const render = () => {
    // Job ids are in no order: what came by an event may be older than the pages that are shown, and is shown all the same.
    rows.update([...known.values()].sort((a, b) => b.created_at - a.created_at || (a.job_id < b.job_id ? -1 : 1)));
    show(noJobs, known.size === 0);
    show(more, older !== null);
  };
  const take = (job) => {
    const had = known.get(job.job_id);
    if (!had || had.version <= job.version) known.set(job.job_id, job);
    heard.set(job.job_id, performance.now());
  };
  const list = async () => {
    const asked = performance.now();
    let cursor = null;
    for (let page = 0; page < pages; page += 1) {
      const answer = await ask(`v1/jobs?limit=${PAGE}${cursor ? `&cursor=${encodeURIComponent(cursor)}` : ""}`);
      answer.items.forEach(take);
      cursor = answer.next_cursor;
      if (cursor === null) break;
    }
    older = cursor;
    for (const [id, job] of known) {
      // On none of the pages, and no event since: it was deleted, or it is older and does not change any more.
      if (heard.get(id) < asked && (older === null || ENDED.has(job.state))) {
        known.delete(id);
        heard.delete(id);
      }
    }
    render();
    trouble.say("");
  };
  more.addEventListener("click", () => {
    pages += 1;
    list().catch((error) => trouble.fail(error));
  });

  const engineRows = new Keyed(engines.body, (e) => `${e.profile_id} ${e.engine_id}`, engineRow);
  const datasetRows = new Keyed(datasets.body, (d) => d.dataset_id, datasetRow);
  const fail = (error) => trouble.fail(error);
  const ends = [
    poll(SLOW_MS, list, fail),
    watch("v1/events", (job) => { take(job); render(); }, line),
    poll(FAST_MS, async () => {
      const [live, made, space] = await Promise.all([ask("v1/engines"), ask("v1/datasets?limit=20"), ask("v1/store")]);
      text(store, room(space));
      store.className = space.free < space.reserved + space.kept_free ? "warn" : "dim";
      engineRows.update(live.items);
      show(noEngines, live.items.length === 0);
      show(engines.element, live.items.length > 0);
      datasetRows.update(made.items);
      show(noDatasets, made.items.length === 0);
      show(datasets.element, made.items.length > 0);
    }, fail),
  ];
  return () => ends.forEach((end) => end());
}

function room(space) {
  const needed = space.reserved ? `, of which running jobs still need ${bytes(space.reserved)}` : "";
  return `${space.samples ? `Samples go to ${space.samples}. ` : ""}${bytes(space.free)} free on the store${needed}; below ${bytes(space.kept_free)} jobs pause.`;
}

function jobRow(first) {
  const name = h("a", { href: `#/jobs/${first.job_id}` });
  const state = stateLabel();
  const why = h("div", { class: "dim" });
  const bar = progress();
  const rows = h("span");
  const cells = Object.fromEntries(["failed", "skipped", "speed", "eta", "bytes"].map((n) => [n, h("td", { class: "n" })]));
  const element = h("tr", {},
    h("td", { class: "id" }, name, h("div", { class: "dim mono" }, first.job_id)),
    h("td", {}, state.element, why), h("td", {}, bar.element, rows),
    cells.failed, cells.skipped, cells.speed, cells.eta, cells.bytes, h("td", {}, time(first.created_at)),
  );
  return {
    element,
    update(job) {
      text(name, job.name || job.job_id);
      state.update(job.state);
      text(why, job.reason ? job.reason.replaceAll("_", " ") : "");
      bar.update(job.rows);
      const ended = job.rows.done + job.rows.failed + job.rows.skipped;
      text(rows, `${count(ended)} of ${count(job.rows.total)}, ${percent(ended, job.rows.total)}`);
      text(cells.failed, count(job.rows.failed));
      cells.failed.className = job.rows.failed ? "n bad" : "n";
      text(cells.skipped, count(job.rows.skipped));
      const over = ENDED.has(job.state);
      text(cells.speed, over || !job.rates.tokens_per_s ? "" : short(job.rates.tokens_per_s));
      text(cells.eta, over || job.eta_s === null ? "" : duration(job.eta_s));
      text(cells.bytes, bytes(job.bytes.committed));
    },
  };
}

function engineRow() {
  const [id, state, model, boundaries, workers, version, profile] = ["id", "", "id", "", "n", "", "mono"].map((c) => h("td", { class: c }));
  return {
    element: h("tr", {}, id, state, model, boundaries, workers, version, profile),
    update(engine) {
      text(id, engine.engine_id);
      text(state, engine.healthy ? "healthy" : "does not answer");
      state.className = engine.healthy ? "" : "bad";
      text(model, engine.profile.model);
      text(boundaries, `${engine.profile.boundaries.join(", ")} + ${engine.profile.final}`);
      text(workers, String(engine.workers));
      text(version, engine.profile.sglang_version ?? "");
      text(profile, engine.profile_id);
    },
  };
}

function datasetRow(first) {
  const name = h("span");
  const state = stateLabel();
  const note = h("div", { class: "dim" });
  const cells = ["accepted", "rejected", "tokens", "max_tokens"].map((n) => [n, h("td", { class: "n" })]);
  return {
    element: h("tr", {},
      h("td", { class: "id" }, name, h("div", { class: "dim mono" }, first.dataset_id)), h("td", {}, state.element, note),
      ...cells.map(([, cell]) => cell), h("td", {}, time(first.created_at))),
    update(dataset) {
      text(name, dataset.name);
      state.update(dataset.state);
      const under = dataset.state === "ingesting" && dataset.bytes_total ? percent(dataset.bytes_read, dataset.bytes_total) : "";
      text(note, dataset.error ? `${dataset.error.code}: ${dataset.error.message}` : under);
      for (const [field, cell] of cells) text(cell, count(dataset[field]));
    },
  };
}
