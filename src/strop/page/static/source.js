"use strict";
// Where the page's data comes from: the server, or this file itself (strop report).

async function ask(name, parameters = {}) {
  const answer = await fetch(`/api/${name}?${new URLSearchParams(parameters)}`);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

const server = {
  live: true,
  runs: () => ask("runs"),
  summary: (run) => ask("summary", { run }),
  metrics: (run, after) => ask("metrics", { run, after }),
  facts: (run) => ask("facts", { run }),
  validation: (run) => ask("validation", { run }),
  distributions: (run, kind) => ask("distributions", { run, kind }),
  columns: (run, kind, step) => ask("columns", { run, kind, step }),
  search: (run, kind, step, text) => ask("search", { run, kind, step, text }),
  rows: (run, kind, step, rows, tokens) =>
    rows.length ? ask("rows", { run, kind, step, rows: rows.join(","), tokens: tokens ? 1 : 0 }) : [],
  history: (run, kind, step, row) => ask("history", { run, kind, step, row }),
  pictures: (run, names) => names.length ? ask("pictures", { run, names }) : {},
};

/** Return the data of this file, compressed in the element "data". */
async function embedded(element) {
  const bytes = Uint8Array.from(atob(element.textContent), (character) => character.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const runs = await new Response(plain).json();
  const samples = (run, kind, step) => {
    const found = runs[run].samples[kind].find((entry) => entry[0] === Number(step));
    if (!found) throw new Error(`this file has no samples of step ${step}`);
    return found[1];
  };
  const texts = (record) => [record.prompt, record.response, record.ground_truth, record.uid,
    record.response_with_special_tokens].map((text) => (text ?? "").toLowerCase());
  return {
    live: false,
    runs: () => runs.map((run) => run.summary.name),
    summary: (run) => runs[run].summary,
    metrics: (run) => runs[run].metrics,
    facts: (run) => runs[run].facts,
    validation: (run) => runs[run].validation,
    distributions: (run, kind) => runs[run].distributions[kind],
    columns: (run, kind, step) => samples(run, kind, step).columns,
    search: (run, kind, step, text) => samples(run, kind, step).records
      .filter((record) => texts(record).some((one) => one.includes(text.toLowerCase())))
      .map((record) => record.row),
    rows: (run, kind, step, rows) => rows.map((row) => samples(run, kind, step).records[row]),
    history: (run, kind, step, row) => {
      const key = (record) => JSON.stringify([record.prompt, record.images]);
      const prompt = key(samples(run, kind, step).records[row]);
      return runs[run].samples[kind].flatMap(([at, found]) =>
        found.records.filter((record) => key(record) === prompt).map((record) => ({ step: at, ...record })));
    },
    pictures: (run) => runs[run].pictures,
  };
}
