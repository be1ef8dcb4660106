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
    el("i", { style: { background: style(COLOURS[run.number % COLOURS.length]) } }), visible(run.name), el("small", {}, standing(run))));
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
  // a resume that went back may have come further than this page was
  const known = String(run.summary?.started) === String(summary.started) ? run.metrics : null;
  const last = known?.steps.at(-1) ?? -1;
  let found = await source.metrics(run.number, last - 1); // the last step may have got its validation
  if (found.last < last) found = await source.metrics(run.number, -1); // it resumed from an earlier step
  const reports = await source.validation(run.number);
  const whole = addSteps(found.steps.length && found.steps[0] <= (known?.steps[0] ?? -1) ? null : known, found);
  Object.assign(run, { summary, reports, metrics: whole }); // together: a request that fails changes nothing
}

function tell(text) {
  document.getElementById("state").textContent = text;
}

function describe() {
  const step = Math.max(...state.runs.map((run) => run.summary.last));
  if (step < 0) return tell("no step yet");
  const newest = Math.max(...state.runs.map((run) => run.summary.written ?? 0));
  const where = state.runs.length > 1 ? `step ${step}` : standing(state.runs[0]);
  tell(source.live ? `${where}, written ${duration(Date.now() / 1000 - newest)} ago` : where);
}

function duration(seconds) {
  const whole = Math.max(Math.round(seconds), 0);
  return whole < 90 ? `${whole} s` : whole < 5400 ? `${Math.round(whole / 60)} min` : whole < 172800 ? `${Math.round(whole / 3600)} h` : `${Math.round(whole / 86400)} days`;
}

/** Return when a running run will end, in ms, at the pace of its last 50 steps; null if it is not known. */
function endOf({ summary, metrics }) {
  const time = metrics.values.get("time/from_scratch") ?? [];
  const known = metrics.steps.map((step, i) => [step, time[i] ?? null]).filter(([, seconds]) => seconds !== null).slice(-50);
  if (!summary.state.of || known.length < 2) return null;
  const [first, then] = known[0], [last, now] = known.at(-1);
  return 1000 * (summary.written + ((summary.state.of - last) * (now - then)) / (last - first));
}

/** Return where a run stands, as "running, step 12 of 40, about 3 min left (18:05)". */
function standing(run) {
  const { text } = run.summary.state, end = endOf(run);
  if (!end || !source.live) return text;
  const at = new Date(end), now = Date.now();
  const day = at - now > 72e6 ? { weekday: "short" } : {};
  return `${text}, about ${duration((at - now) / 1000)} left (${at.toLocaleString([], { ...day, hour: "2-digit", minute: "2-digit" })})`;
}

/** Read what runs have written meanwhile; redraw where it is shown whole and nobody is in the midst of a zoom. */
async function poll() {
  try {
    let isNew = false;
    for (const run of state.runs) {
      const before = JSON.stringify([run.summary.last, run.summary.written, run.summary.steps, run.summary.started]);
      const summary = await source.summary(run.number);
      if (JSON.stringify([summary.last, summary.written, summary.steps, summary.started]) !== before) {
        await readRun(run, summary);
        isNew = true;
      }
      run.summary = summary; // a run may end without a new step
    }
    describe();
    if (!document.activeElement?.closest("#runs")) drawFrame();
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
