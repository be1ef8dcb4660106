"use strict";
// Validation tables, and the machine, versions and configuration of the runs.

async function validationView() {
  const view = el("div", {});
  for (const run of state.runs.filter((run) => run.shown)) {
    const reports = await source.validation(run.number);
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
  return el("section", {}, el("h3", {}, visible(name)),
    el("div", { class: "scroll" }, el("table", { class: "numbers" },
      el("thead", {}, el("tr", {}, ["step", ...statistics, "tokens", "cut", "errors", "samples"].map((title) => el("th", {}, visible(title))))),
      el("tbody", {}, lines))));
}

async function runView() {
  const view = el("div", {});
  for (const run of state.runs.filter((run) => run.shown)) {
    const { config, starts } = await source.facts(run.number);
    view.append(el("h2", { class: "run" }, visible(run.name)), el("p", { class: "quiet" }, visible(run.summary.folder)));
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
    ["Command", [start.command].flat().join(" ")],
  ];
  return el("div", { class: "scroll" }, el("table", { class: "facts" }, lines.filter(([, value]) => value)
    .map(([label, value]) => el("tr", {}, el("th", {}, label), el("td", {}, visible(value))))));
}
