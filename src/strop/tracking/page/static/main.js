"use strict";
// The page: which view the address names, and new steps of a run that writes.

const POLL_MS = 3000;
const VIEWS = new Map([["curves", "Curves"], ["samples", "Samples"], ["validation", "Validation"], ["run", "Run"]]);
const state = { runs: [] };
let source = server;

function route() {
  const [name, query] = location.hash.slice(1).split("?");
  return { name: VIEWS.has(name) ? name : "curves", parameters: new URLSearchParams(query ?? "") };
}

function drawFrame() {
  const { name } = route();
  document.getElementById("tabs").replaceChildren(...[...VIEWS].map(([key, label]) =>
    el("a", { href: `#${key}`, class: key === name ? "on" : "", "aria-current": key === name ? "page" : null }, label)));
  const chips = state.runs.length < 2 ? [] : state.runs.map((run) => el("label", { class: "chip" },
    el("input", { type: "checkbox", checked: run.shown, onchange: (event) => { run.shown = event.target.checked; show(); } }),
    el("i", { style: { background: style(COLOURS[run.number % COLOURS.length]) } }), visible(run.name)));
  document.getElementById("runs").replaceChildren(...chips);
  document.title = `${state.runs.map((run) => visible(run.name)).join(", ")} · strop`;
}

let showing = 0;
async function show() {
  const turn = ++showing;
  const { name, parameters } = route();
  hideTip();
  drawFrame();
  let view;
  try {
    forgetCharts();
    view = await (name === "samples" ? (parameters.has("row") ? detailView(parameters) : samplesView(parameters))
      : { curves: curvesView, validation: validationView, run: runView }[name](parameters));
  } catch (error) {
    view = el("p", { class: "error" }, visible(error.message));
  }
  if (turn !== showing) return; // the address has changed meanwhile
  document.getElementById("main").replaceChildren(view);
}

async function readRun(run, summary) {
  const last = run.metrics?.steps.at(-1) ?? -1;
  run.summary = summary;
  let found = await source.metrics(run.number, last - 1); // the last step may have got its validation
  if (found.last < last) found = await source.metrics(run.number, -1); // it resumed from an earlier step
  run.metrics = addSteps(found.steps.length && found.steps[0] <= (run.metrics?.steps[0] ?? -1) ? null : run.metrics, found);
}

function tell(text) {
  document.getElementById("state").textContent = text;
}

function describe() {
  const step = Math.max(...state.runs.map((run) => run.summary.last));
  if (step < 0) return tell("no step yet");
  const newest = Math.max(...state.runs.map((run) => run.summary.written ?? 0));
  const age = Math.max(Math.round(Date.now() / 1000 - newest), 0);
  const when = age < 90 ? `${age} s` : age < 5400 ? `${Math.round(age / 60)} min` : age < 172800 ? `${Math.round(age / 3600)} h` : `${Math.round(age / 86400)} days`;
  tell(source.live ? `step ${step}, written ${when} ago` : `step ${step}`);
}

/** Read what runs have written meanwhile; redraw where it is shown whole and nobody is in the midst of a zoom. */
async function poll() {
  try {
    let isNew = false;
    for (const run of state.runs) {
      const before = JSON.stringify([run.summary.last, run.summary.written, run.summary.steps]);
      const summary = await source.summary(run.number);
      if (JSON.stringify([summary.last, summary.written, summary.steps]) !== before) {
        await readRun(run, summary);
        isNew = true;
      }
    }
    describe();
    const { name } = route();
    const zoomed = [...drawn].some((plot) => plot.scales.x.min > plot.data[0][0] || plot.scales.x.max < plot.data[0].at(-1));
    if (isNew && name === "validation") await show();
    if (isNew && name === "curves" && !(zoomed && hasZoomed) && document.activeElement?.tagName !== "INPUT") await show();
    if (isNew) hasZoomed = zoomed;
  } catch (error) {
    tell(`no answer from strop view: ${error.message}`);
  }
  setTimeout(poll, POLL_MS);
}
let hasZoomed = false;

async function start() {
  try {
    const data = document.getElementById("data");
    if (data) source = await embedded(data);
    state.runs = (await source.runs()).map((name, number) => ({ name, number, shown: true }));
    for (const run of state.runs) await readRun(run, await source.summary(run.number));
    describe();
    await show();
  } catch (error) {
    document.getElementById("main").replaceChildren(el("p", { class: "error" }, visible(error.message)));
    return;
  }
  window.addEventListener("hashchange", () => { window.scrollTo(0, 0); show(); });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  window.addEventListener("scroll", hideTip, { passive: true });
  if (source.live) setTimeout(poll, POLL_MS);
}

start();
