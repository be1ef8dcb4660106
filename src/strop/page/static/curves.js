"use strict";
// The curves of one run or several, overlaid.

const curveSettings = { smooth: "", axis: "step", find: "" };

/** Add new steps to the metrics of a run: {steps, values, shown: Maps of name to values and to the name that shows it}. */
function addSteps(known, found) {
  if (!known || found.last < (known.steps.at(-1) ?? -1)) known = { steps: [], values: new Map() };
  const keep = known.steps.findIndex((step) => found.steps.length && step >= found.steps[0]);
  const kept = keep < 0 ? known.steps.length : keep;
  const values = new Map();
  const empty = new Array(kept).fill(null);
  found.names.forEach((name, i) => {
    values.set(name, [...(known.values.get(name) ?? empty).slice(0, kept), ...found.values[i]]);
  });
  const shown = new Map(found.names.map((name, i) => [name, found.shown[i]]));
  return { steps: [...known.steps.slice(0, kept), ...found.steps], values, shown };
}

function curvesView() {
  const shown = state.runs.filter((run) => run.shown);
  const view = el("div", {});
  const panels = el("div", { class: "panels" });
  const redraw = () => { forgetCharts(); panels.replaceChildren(...panelsOf(shown)); };
  view.append(
    el("div", { class: "controls" },
      select("Axis", [["step", "step"], ["time/from_scratch", "seconds of training"]], curveSettings.axis,
        (value) => { curveSettings.axis = value; redraw(); }),
      select("Smoothing", [["", "automatic"], [0, "none"], [5, "5 steps"], [15, "15 steps"], [51, "51 steps"]], curveSettings.smooth,
        (value) => { curveSettings.smooth = value; redraw(); }),
      el("label", {}, el("span", {}, "Metrics"), el("input", {
        type: "search", placeholder: "main ones; type a part of a name", value: curveSettings.find,
        oninput: (event) => { curveSettings.find = event.target.value; redraw(); },
      })),
      el("span", { class: "quiet hint" }, "drag to zoom, double-click to reset",
        shown.some((run) => run.summary.resumed.length) ? "; dashed: where a run was resumed" : "")),
    panels);
  redraw();
  return view;
}

function panelsOf(shown) {
  const find = curveSettings.find.trim().toLowerCase();
  let panels = new Map();
  if (find) {
    const names = new Set(shown.flatMap((run) => [...run.metrics.values.keys()]));
    const found = new Map();  // metrics that hold the same numbers in all runs are one panel
    for (const name of names) {
      const key = JSON.stringify(shown.map((run) => run.metrics.shown.get(name)));
      if (name.toLowerCase().includes(find) && !found.has(key)) found.set(key, name);
    }
    panels = new Map([...found.values()].slice(0, 24).map((name) => [name, { title: name, unit: "", curves: [[name, name]] }]));
  } else {
    for (const run of shown) {
      for (const panel of run.summary.panels) {
        const known = panels.get(panel.title) ?? panel;
        const curves = new Map([...known.curves, ...panel.curves]);
        panels.set(panel.title, { ...known, curves: [...curves] });
      }
    }
  }
  const boxes = [...panels.values()].map((panel) => panelOf(panel, shown)).filter((box) => box);
  return boxes.length ? boxes : [el("p", { class: "quiet" }, find ? "No metric has this in its name." : "Nothing is logged yet.")];
}

function panelOf(panel, shown) {
  const curves = [];
  for (const run of shown) {
    const time = curveSettings.axis === "step" ? null : run.metrics.values.get(curveSettings.axis);
    let own = 0;
    for (const [label, name] of panel.curves) {
      const values = run.metrics.values.get(name);
      if (!values) continue;
      const at = run.metrics.steps.map((step, i) => i).filter((i) => values[i] !== null && (!time || time[i] !== null));
      if (!at.length) continue;
      const y = at.map((i) => values[i]);
      // Without a KL penalty the reward is the score itself: one curve is enough.
      if (curves.some((other) => other.run === run && String(other.y) === String(y))) continue;
      curves.push({
        run, x: at.map((i) => (time ? time[i] : run.metrics.steps[i])), y,
        interval: intervalOf(run, name, at.map((i) => run.metrics.steps[i])),
        label: visible(shown.length > 1 ? `${run.name}${panel.curves.length > 1 ? `, ${label}` : ""}` : label),
        colour: COLOURS[(shown.length > 1 ? run.number : own) % COLOURS.length],
        dash: shown.length > 1 ? DASHES[own % DASHES.length] : [],
      });
      own += 1;
    }
  }
  if (!curves.length) return null;
  const lines = curves.flatMap((curve) => withMean(curve, curveSettings.smooth === "" ? null : Number(curveSettings.smooth)));
  const bands = [];
  for (const curve of curves.filter(({ interval }) => interval)) {
    const edge = (key) => lines.push({ ...curve, y: curve.interval.map((one) => one?.[key] ?? null), faint: true, width: 0, points: false });
    bands.push({ series: [edge("high"), edge("low")], fill: `${style(curve.colour)}28` });
  }
  const marks = shown.flatMap((run) => run.summary.resumed.map((step) => {
    const at = run.metrics.steps.indexOf(step);
    return curveSettings.axis === "step" ? step : run.metrics.values.get(curveSettings.axis)?.[at];
  }).filter((x) => x));
  return el("section", { class: "panel" },
    el("h2", {}, visible(panel.title), el("small", {}, panel.unit, bands.length ? ", 95 % interval" : "")),
    chart(lines, { x: curveSettings.axis === "step" ? "step" : "seconds", limits: panel.limits, bands, marks }));
}

/** Return the interval of a validation score at each step, null where it has none; null for other metrics. */
function intervalOf(run, name, steps) {
  if (!name.startsWith("val/test_score/")) return null;
  const scores = new Map(run.reports.map(({ step, sources }) => [step, Object.values(sources[name.slice(15)]?.scores ?? {})[0]]));
  return steps.map((step) => scores.get(step) ?? null);
}
