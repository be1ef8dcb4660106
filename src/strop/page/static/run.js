"use strict";
// Validation tables, and the machine, versions and configuration of the runs.

async function validationView() {
  const view = el("div", {});
  for (const run of state.runs.filter((run) => run.shown)) {
    const { reports } = run;
    if (state.runs.length > 1) view.append(el("h2", { class: "run" }, el("i", { style: { background: style(COLOURS[run.number % COLOURS.length]) } }), visible(run.name)));
    if (!reports.length) view.append(el("p", { class: "quiet" }, "No validation yet (trainer.test_freq)."));
    for (const name of new Set(reports.flatMap((report) => Object.keys(report.sources)))) {
      view.append(validationOf(run, name, reports.filter((report) => Object.hasOwn(report.sources, name))));
    }
  }
  return view;
}

function validationOf(run, name, reports) {
  const statistics = [...new Set(reports.flatMap((report) => Object.keys(report.sources[name].scores)))];
  const best = Math.max(...reports.map((report) => report.sources[name].scores[statistics[0]]?.value ?? -Infinity));
  const number = (value, how = short) => el("td", {}, value === null || value === undefined ? "–" : how(value));
  const percent = (value) => `${(100 * value).toFixed(1)} %`;
  const lines = reports.toReversed().map((report) => {
    const found = report.sources[name];
    return el("tr", {}, el("th", {}, el("a", { href: addressOf({ run, kind: "validation", step: report.step }) }, report.step)),
      statistics.map((key) => {
        const score = found.scores[key];
        if (!score) return number(null);
        return el("td", { class: key === statistics[0] && score.value === best ? "best" : "" }, score.value.toFixed(3),
          el("small", {}, `${score.low.toFixed(3)} to ${score.high.toFixed(3)}`));
      }),
      number(found.mean_length), number(found.truncated, percent), number(found.error_rate, percent), number(found.samples));
  });
  return el("section", {}, el("h3", {}, visible(name)), el("p", {}, comparison(reports, name)),
    el("div", { class: "scroll" }, el("table", { class: "numbers" },
      el("thead", {}, el("tr", {}, ["step", ...statistics, "tokens", "cut", "errors", "samples"].map((title) => el("th", {}, visible(title))))),
      el("tbody", {}, lines))));
}

/** Compare the last score with the first and the best; a difference within their intervals is noise. */
function comparison(reports, name) {
  const scored = reports.flatMap(({ step, sources }) => Object.values(sources[name].scores).slice(0, 1).map((score) => ({ step, ...score })));
  if (scored.length < 2) return "";
  const first = scored[0], last = scored.at(-1), best = scored.reduce((a, b) => (b.value >= a.value ? b : a));
  const against = (other) => {
    const change = last.value - other.value, error = Math.hypot(last.high - last.low, other.high - other.low) / 2;
    return `${other.value.toFixed(3)} at step ${other.step}: ${Math.abs(change) <= error ? "no difference beyond noise" : `the last is ${change > 0 ? "+" : ""}${change.toFixed(3)} from it`}`;
  };
  return `Last ${last.value.toFixed(3)} at step ${last.step}${best === last ? ", the best" : ""}; first ${against(first)}${best === last || best === first ? "" : `; best ${against(best)}`}`;
}

async function runView() {
  const view = el("div", {});
  for (const run of state.runs.filter((run) => run.shown)) {
    const { config, model, starts } = await source.facts(run.number);
    view.append(el("h2", { class: "run" }, visible(run.name)), factsTable([
      ["State", standing(run)], ["Folder", run.summary.folder], ["Trained model", model]]));
    for (const start of starts.toReversed()) view.append(startOf(start));
    if (!starts.length) view.append(el("p", { class: "quiet" }, "machine.jsonl is missing: an earlier version wrote this run."));
    view.append(el("details", {}, el("summary", {}, "Configuration (config.yaml)"), el("pre", { class: "config" }, visible(config))));
  }
  return view;
}

function startOf(start) {
  const packages = Object.entries(start.packages ?? {}).map(([name, version]) => `${name} ${version}`).join(", ");
  const lines = [
    ["Started", `${start.started}, after step ${start.step}`], ["Host", start.host], ["System", start.system],
    ["Processor", `${start.processor}, ${start.cores} cores`], ["Memory", start.memory_gib && `${start.memory_gib} GiB`],
    ["GPUs", [start.gpus ?? []].flat().join("\n") || "none"], ["Python", start.python], ["Packages", packages],
    ["Image processor", start.image_processor],
    ["Command", [start.command].flat().join(" ")],
  ];
  return factsTable(lines);
}

function factsTable(lines) {
  return el("div", { class: "scroll" }, el("table", { class: "facts" }, lines.filter(([, value]) => value)
    .map(([label, value]) => el("tr", {}, el("th", {}, label), el("td", {}, visible(value))))));
}
