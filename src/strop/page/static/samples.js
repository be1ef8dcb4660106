"use strict";
// The samples of a step: distributions, search, order, one line per prompt.

const PER_PAGE = 50;
const KIND_NAMES = { rollouts: "training", validation: "validation" };
const list = { sort: "row", search: "", source: "", page: 0 };

/** Return which samples the address names: run, kind and step, the newest step unless it says another. */
function placeOf(parameters) {
  const run = state.runs[Number(parameters.get("run") ?? 0)] ?? state.runs[0];
  const steps = run.summary.steps;
  const kind = parameters.get("kind") ?? (steps.rollouts.length || !steps.validation.length ? "rollouts" : "validation");
  const known = steps[kind] ?? [];
  const step = parameters.has("step") ? Number(parameters.get("step")) : known.at(-1);
  return { run, kind, step, steps: known };
}

function addressOf(place, more = {}) {
  return `#samples?${new URLSearchParams({ run: place.run.number, kind: place.kind, step: place.step, ...more })}`;
}

/** Return the thumbnails of samples by their names. */
function picturesOf(place, samples) {
  return source.pictures(place.run.number, [...new Set(samples.flatMap((sample) => sample.images ?? []))]);
}

/** Return the pictures of a sample, each with its words in the prompt as a caption, or as a title alone. */
function gallery(sample, thumbnails, captions = false) {
  if (!sample.images?.length) return "";
  const words = promptParts(sample).filter((part) => part.number);
  return el("span", { class: captions ? "pictures" : "pictures small" }, sample.images.map((name, i) => {
    const label = visible(words[i]?.words ?? `picture ${i + 1}`);
    return el("figure", { title: label },
      thumbnails[name] ? el("img", { src: thumbnails[name], alt: label }) : el("span", { class: "picture" }, "no thumbnail"),
      captions && el("figcaption", {}, label));
  }));
}

/** Return a prompt's texts, and as {number, words, tokens} its pictures; text that looks like one stays text. */
function promptParts(sample) {
  const parts = [], count = sample.images?.length ?? 0, prompt = sample.prompt ?? "";
  let end = 0, number = 1;
  for (const found of prompt.matchAll(/\[(picture (\d+): (?:.*?, )?\d+ x \d+), (\d+) tokens\]/g)) {
    if (number > count || Number(found[2]) !== number) continue;
    parts.push(prompt.slice(end, found.index), { number, words: found[1], tokens: Number(found[3]) });
    end = found.index + found[0].length;
    number += 1;
  }
  return [...parts, prompt.slice(end)];
}

async function samplesView(parameters) {
  const place = placeOf(parameters);
  const go = (more) => { list.page = 0; location.hash = addressOf({ ...place, ...more }); };
  const controls = el("div", { class: "controls" },
    state.runs.length > 1 && select("Run", state.runs.map((run) => [run.number, visible(run.name)]), place.run.number,
      (value) => { location.hash = `#samples?${new URLSearchParams({ run: value, kind: place.kind })}`; }),
    select("Samples of", Object.entries(KIND_NAMES), place.kind,
      (value) => { location.hash = `#samples?${new URLSearchParams({ run: place.run.number, kind: value })}`; }));
  if (!place.steps.length) {
    return el("div", {}, controls, el("p", { class: "quiet" }, "No samples are written yet (trainer.log_rollouts, trainer.test_freq)."));
  }
  const at = place.steps.indexOf(place.step);
  const turn = (to, label, name) => el("button", { type: "button", "aria-label": name, disabled: to < 0 || to >= place.steps.length, onclick: () => go({ step: place.steps[to] }) }, label);
  controls.append(
    select("Step", place.steps.map((step) => [step, step]), place.step, (value) => go({ step: Number(value) })),
    el("span", { class: "pair" }, turn(at - 1, "‹", "step before"), turn(at + 1, "›", "step after")));
  const found = await source.columns(place.run.number, place.kind, place.step);
  const table = { ...found, columns: new Map(found.columns) };
  const sources = [...new Set(table.columns.get("data_source") ?? [])];
  if (!sources.includes(list.source)) list.source = ""; // chosen for another kind, step or run
  const results = el("div", {});
  const update = () => fillResults(results, place, table);
  let waiting;
  controls.append(
    el("label", {}, el("span", {}, "Search"), el("input", {
      type: "search", placeholder: "prompt, response, truth, uid", value: list.search,
      oninput: (event) => { list.search = event.target.value; list.page = 0; clearTimeout(waiting); waiting = setTimeout(update, 250); },
    })),
    sources.length > 1 && select("Source", [["", "all"], ...sources.map((name) => [name, visible(name)])], list.source,
      (value) => { list.source = value; list.page = 0; update(); }) || "",
    select("Order", [["row", "as written"], ["-score", "highest score"], ["score", "lowest score"], ["-length", "longest"],
      ["length", "shortest"], ["-spread", "score differs most in group"]], list.sort, (value) => { list.sort = value; list.page = 0; update(); }));
  await update();
  const courses = el("details", { class: "courses", ontoggle: (event) => event.target.open && fillCourses(event.target, place) },
    el("summary", {}, "Scores and lengths over the steps"));
  return el("div", {}, controls, results, courses);
}

/** Return the rows that search and filter leave. */
async function matching(place, table) {
  let rows = [...Array(table.rows).keys()];
  if (list.search.trim()) rows = await source.search(place.run.number, place.kind, place.step, list.search.trim());
  const sources = table.columns.get("data_source");
  return list.source && sources ? rows.filter((row) => sources[row] === list.source) : rows;
}

/** Return rows grouped by uid, in order of first appearance. */
function groupsOf(rows, table) {
  const uids = table.columns.get("uid"), groups = new Map();
  for (const row of rows) {
    const uid = uids ? uids[row] : String(row);
    groups.has(uid) ? groups.get(uid).push(row) : groups.set(uid, [row]);
  }
  return groups;
}

async function fillResults(results, place, table) {
  const asked = results.asked = {};
  const rows = await matching(place, table);
  if (results.asked !== asked) return; // a newer search is under way
  const scores = table.columns.get("score") ?? new Array(table.rows).fill(null);
  const groups = groupsOf(rows, table);
  const spread = new Map([...groups].map(([uid, own]) => {
    const known = own.map((row) => scores[row] ?? 0);
    return [uid, Math.max(...known) - Math.min(...known)];
  }));
  const uids = table.columns.get("uid");
  const key = { score: (row) => scores[row] ?? -Infinity, length: (row) => table.length[row],
    spread: (row) => spread.get(uids ? uids[row] : String(row)), row: (row) => row }[list.sort.replace("-", "")];
  const sign = list.sort.startsWith("-") ? -1 : 1;
  const order = (a, b) => sign * (key(a) - key(b)) || a - b;
  const entries = [...groups.values()].map((own) => own.sort(order)).sort((a, b) => order(a[0], b[0]));
  const pages = Math.max(Math.ceil(entries.length / PER_PAGE), 1);
  list.page = Math.min(list.page, pages - 1);
  const shown = entries.slice(list.page * PER_PAGE, (list.page + 1) * PER_PAGE);
  const records = await source.rows(place.run.number, place.kind, place.step, shown.map((own) => own[0]), false);
  const thumbnails = await picturesOf(place, records);
  if (results.asked !== asked) return;
  const page = (to, label, name) => el("button", { type: "button", "aria-label": name, disabled: to < 0 || to >= pages, onclick: () => { list.page = to; fillResults(results, place, table); } }, label);
  const count = `${groups.size.toLocaleString("en")} prompts, ${rows.length.toLocaleString("en")} samples`;
  const all = table.of ?? table.rows;
  results.replaceChildren(
    el("div", { class: "histograms" },
      histogram("Score", rows.map((row) => scores[row])), histogram("Length, tokens", rows.map((row) => table.length[row]))),
    el("div", { class: "pager" }, el("b", {}, count), all > rows.length ? ` of ${all.toLocaleString("en")}` : "",
      table.of > table.rows ? " (this file holds the first ones)" : "",
      el("span", { class: "pair" }, page(list.page - 1, "‹", "page before"), `${list.page + 1} / ${pages}`, page(list.page + 1, "›", "page after"))),
    el("ol", { class: "list" }, shown.map((own, i) => lineOf(records[i], own, place, table, scores, thumbnails))));
}

/** Return the line of a prompt: its one sample, or several, which a click unfolds. */
function lineOf(record, rows, place, table, scores, thumbnails) {
  const uid = el("span", { class: "uid" }, visible(record.uid ?? record.row));
  const text = promptParts(record).map((part) => (part.number ? `[picture ${part.number}]` : part)).join("");
  const question = [el("span", { class: "prompt" }, gallery(record, thumbnails), excerpt(text, 140, true)),
    el("span", { class: "truth" }, record.ground_truth === null ? "" : el("small", {}, "truth "), excerpt(record.ground_truth, 60))];
  if (rows.length === 1) return el("li", {}, sampleLine(record, place, uid, ...question));
  const cut = table.columns.get("truncated");
  const chips = el("span", { class: "chips" }, rows.slice(0, 16).map((row) => el("i", { title: `score ${short(scores[row])}`, class: cut?.[row] ? "cut" : "" }, short(scores[row]))));
  const middle = `mean ${short(mean(rows.map((row) => scores[row])))}, ${short(mean(rows.map((row) => table.length[row])))} tokens`;
  return el("li", {}, el("details", { ontoggle: (event) => event.target.open && unfold(event.target, rows, place) },
    el("summary", {}, uid, chips, ...question, el("span", { class: "response quiet" }, middle))));
}

function sampleLine(record, place, uid, ...question) {
  return el("a", { href: addressOf(place, { row: record.row, show: "sample" }) }, uid,
    el("span", { class: "facts" }, el("b", {}, short(record.score)), el("span", {}, `${short(record.length)} tokens`),
      record.truncated ? el("em", {}, "cut") : "", record.reward_failed ? el("em", {}, "not scored") : ""),
    ...question,
    el("span", { class: question.length ? "response" : "response wide" }, excerpt(record.response_with_special_tokens || record.response, 140)));
}

/** Add the samples of a prompt to its line, when it is first opened. */
async function unfold(details, rows, place) {
  if (details.querySelector("a")) return;
  const records = await source.rows(place.run.number, place.kind, place.step, rows.slice(0, 64), false);
  if (details.querySelector("a")) return;
  details.append(...records.map((record) => sampleLine(record, place, el("span", { class: "uid" }, `row ${record.row}`))),
    el("a", { href: addressOf(place, { row: rows[0], show: "group" }) }, el("span", { class: "wide uid" }, "side by side, token by token")));
}

/** Draw quantiles of scores and lengths at each step, when they are first opened. */
async function fillCourses(details, place) {
  if (details.querySelector(".panels")) return;
  const panels = el("div", { class: "panels" });
  details.append(panels);
  const found = await source.distributions(place.run.number, place.kind);
  const labels = ["lowest", "10 %", "median", "90 %", "highest"];
  for (const [title, unit, name] of [["Score", "quantiles over samples", "score"], ["Length", "tokens, quantiles", "length"]]) {
    const at = found.steps.map((step, i) => i).filter((i) => found[name][i]);
    if (!at.length) continue;
    const curves = labels.map((label, q) => ({
      label, x: at.map((i) => found.steps[i]), y: at.map((i) => found[name][i][q]), colour: q === 2 ? "--c1" : "--quiet",
      width: q === 2 ? 2 : 0.8, points: false,
    }));
    panels.append(el("section", { class: "panel" }, el("h2", {}, title, el("small", {}, unit)),
      chart(curves, { bands: [{ series: [4, 2], fill: style("--band") }, { series: [5, 1], fill: style("--band") }] })));
  }
}
