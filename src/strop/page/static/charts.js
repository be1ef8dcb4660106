"use strict";
// Curves by uPlot, histograms as SVG.

const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7"];
const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3]];
const cursors = uPlot.sync("steps");
const drawn = new Set();
const grown = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.chart && target.clientWidth) target.chart.setSize({ width: target.clientWidth, height: target.height });
  }
});

function forgetCharts() {
  for (const chart of drawn) chart.destroy();
  drawn.clear();
  grown.disconnect();
}

const SMOOTH_FROM = 40; // as in curves.png

/** Return a curve as it is, or drawn faintly with its running mean on top. */
function withMean(curve, window) {
  const size = window ?? (curve.y.length < SMOOTH_FROM ? 0 : 2 * Math.floor(curve.y.length / 40) + 1);
  if (size < 2) return [curve];
  return [{ ...curve, faint: true, width: 0.8, points: false }, { ...curve, y: smoothed(curve.y, size), points: false }];
}

/** Return the mean over `window` values around each, fewer at the ends. */
function smoothed(values, window) {
  const reach = Math.floor(window / 2), size = 2 * reach + 1;
  const sum = windowSums(values.map((value) => value ?? 0), size);
  const count = windowSums(values.map((value) => (value === null ? 0 : 1)), size);
  return values.map((value, at) => {
    const ends = [Math.max(at - reach, 0), Math.min(at + reach, values.length - 1)];
    return value === null ? null : sum(...ends) / count(...ends);
  });
}

/**
 * Return a function of a window's first and last place, for windows of `size`, shorter at the ends of all.
 *
 * Runs have 100,000 steps, so each value is added twice alone: to the sums from the start of its block of `size`
 * values and to its end. Differences of sums over all would lose small values beside a large one.
 */
function windowSums(values, size) {
  const fromStart = [], toEnd = new Array(values.length);
  values.forEach((value, at) => fromStart.push(at % size ? fromStart[at - 1] + value : value));
  for (let at = values.length - 1; at >= 0; at--) {
    toEnd[at] = values[at] + ((at + 1) % size && at + 1 < values.length ? toEnd[at + 1] : 0);
  }
  return (first, last) => {
    if (Math.floor(first / size) !== Math.floor(last / size)) return toEnd[first] + fromStart[last];
    return first % size ? toEnd[first] : fromStart[last];
  };
}

/** Join curves [{label, x, y, colour, dash, width}] over one axis: uPlot takes a single list of x. */
function joined(curves) {
  const all = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  return [all, ...curves.map((curve) => {
    const at = new Map(curve.x.map((x, i) => [x, curve.y[i]]));
    return all.map((x) => at.get(x) ?? null);
  })];
}

/** Return a chart in a box that fills its column; `options`: x (its label), height, limits, bands, marks (of x). */
function chart(curves, options = {}) {
  const box = el("div", { class: "chart" });
  box.height = options.height ?? 190;
  const axis = {
    size: 30,
    stroke: style("--quiet"), font: "11px system-ui, sans-serif",
    grid: { stroke: style("--line"), width: 1 }, ticks: { show: false },
  };
  const few = Math.max(...curves.map((curve) => curve.x.length)) <= 25;
  const series = curves.map((curve) => ({
    label: curve.label, class: curve.faint ? "faint" : undefined, stroke: style(curve.colour) + (curve.faint ? "55" : ""), width: curve.width ?? 1.8, dash: curve.dash ?? [],
    spanGaps: true, points: { show: curve.points ?? few, size: 5 },
    value: (self, value) => short(value),
  }));
  queueMicrotask(() => {
    const plot = new uPlot({
      width: box.clientWidth || 320, height: box.height, series: [{ label: options.x ?? "step" }, ...series],
      cursor: { sync: { key: cursors.key }, points: { size: 7 } },
      scales: { x: { time: false }, y: { range: options.limits ?? rangeOf } },
      hooks: { drawAxes: [(self) => drawMarks(self, options.marks ?? [])] },
      bands: options.bands ?? [],
      axes: [axis, { ...axis, size: 52, values: (self, ticks) => ticks.map((tick) => short(tick)) }],
      legend: { live: true },
    }, joined(curves), box);
    box.chart = plot;
    drawn.add(plot);
    grown.observe(box);
  });
  return box;
}

/** Return the ends of an axis as uPlot does, and 0 to 1 for a curve that is 0 throughout. */
function rangeOf(self, low, high) {
  if (low === null) return [null, null];
  return low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true);
}

function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = style("--quiet");
  ctx.setLineDash([4, 4]);
  for (const mark of marks.filter((x) => x >= plot.scales.x.min && x <= plot.scales.x.max)) {
    const x = Math.round(plot.valToPos(mark, "x", true));
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

/** Return a histogram of numbers with its count, mean and ends. */
function histogram(title, values) {
  const known = values.filter((value) => value !== null);
  const figure = el("figure", { class: "histogram" }, el("figcaption", {}, title));
  if (!known.length) return figure;
  let low = Infinity, high = -Infinity;
  for (const value of known) { low = Math.min(low, value); high = Math.max(high, value); }
  const last = high, whole = high > low && known.every(Number.isInteger);
  let n = high === low ? 1 : Math.min(30, Math.max(2, new Set(known.slice(0, 2000)).size));
  if (whole) {  // each bar has as many whole numbers, or some would be twice as high as their neighbours
    const each = Math.ceil((high - low + 1) / 30);
    n = Math.ceil((high - low + 1) / each);
    high = low + n * each;
  }
  const counts = new Array(n).fill(0);
  for (const value of known) counts[high === low ? 0 : Math.min(n - 1, Math.floor(((value - low) * n) / (high - low)))] += 1;
  const most = Math.max(...counts);
  const bars = counts.map((count, i) => {
    const from = low + ((high - low) * i) / n, to = low + ((high - low) * (i + 1)) / n - (whole ? 1 : 0);
    return svg("rect", { x: i * (300 / n) + 0.75, width: 300 / n - 1.5, y: 60 - (58 * count) / most, height: (58 * count) / most },
      svg("title", {}, `${short(from)} to ${short(to)}: ${count.toLocaleString("en")}`));
  });
  figure.append(svg("svg", { viewBox: "0 0 300 60", preserveAspectRatio: "none", role: "img" }, ...bars),
    el("div", { class: "ends" }, el("span", {}, short(low)), el("span", {}, `mean ${short(mean(known))}`), el("span", {}, short(last))));
  return figure;
}
