"use strict";
// A response, its tokens coloured by one of their numbers.

/** Return the numbers of a sample's tokens by name, with those that others give. */
function numbersOf(sample) {
  const numbers = new Map(sample.tokens.numbers);
  const pair = (first, second, how) => {
    const a = numbers.get(first), b = numbers.get(second);
    return a && b ? a.map((x, i) => (x === null || b[i] === null ? null : how(x, b[i]))) : null;
  };
  const old = numbers.has("old_log_probs") ? "old_log_probs" : "rollout_log_probs";
  const derived = [
    ["ratio", pair("update_log_probs", old, (now, then) => Math.exp(now - then))],
    ["difference", pair("old_log_probs", "rollout_log_probs", (trainer, sampler) => trainer - sampler)],
    ["teacher", pair("teacher_log_prob", old, (teacher, policy) => teacher - policy)],
    ["kl", pair(old, "ref_log_prob", (policy, reference) => policy - reference)],
    ["probability", numbers.has("rollout_log_probs") && numbers.get("rollout_log_probs").map((x) => x === null ? null : Math.exp(x))],
  ];
  for (const [name, values] of derived) if (values) numbers.set(name, values);
  return numbers;
}

/** What tokens can be coloured by: name in `numbersOf` -> label, scale and the middle of a two-sided scale. */
const MEASURES = new Map([
  ["advantages", { label: "advantage", middle: 0 }],
  ["values", { label: "value", }],
  ["ratio", { label: "ratio (new / old policy)", middle: 1 }],
  ["entropys", { label: "entropy", low: 0 }],
  ["difference", { label: "trainer − sampler log-prob", middle: 0 }],
  ["teacher", { label: "teacher − policy log-prob", middle: 0 }],
  ["kl", { label: "policy − reference log-prob", middle: 0 }],
  ["probability", { label: "probability", low: 0, high: 1 }],
  ["returns", { label: "return" }],
  ["token_level_rewards", { label: "reward", middle: 0 }],
]);
const ON_HOVER = [
  ["advantages", "advantage"], ["values", "value"], ["returns", "return"], ["token_level_rewards", "reward"],
  ["ratio", "ratio new / old"], ["entropys", "entropy"], ["probability", "probability"],
  ["rollout_log_probs", "log-prob, sampler"], ["old_log_probs", "log-prob, trainer"],
  ["difference", "trainer − sampler"], ["ref_log_prob", "log-prob, reference"], ["kl", "policy − reference"],
  ["teacher_log_prob", "log-prob, teacher"], ["teacher", "teacher − policy"],
];

/** Return the scale of a measure over samples, so that their colours can be compared. */
function scaleOf(name, samples) {
  const measure = MEASURES.get(name);
  const all = samples.flatMap((sample) => (numbersOf(sample).get(name) ?? []).filter((x, i) => x !== null && sample.tokens.mask[i]));
  all.sort((a, b) => a - b);
  if (measure.middle !== undefined) {
    const reach = quantile(all.map((x) => Math.abs(x - measure.middle)).sort((a, b) => a - b), 0.98) || 1e-6;
    return { low: measure.middle - reach, high: measure.middle + reach, middle: measure.middle };
  }
  const low = measure.low ?? quantile(all, 0.02), high = measure.high ?? quantile(all, 0.98);
  return { low, high: high > low ? high : low + 1e-6 };
}

function colourOf(value, scale) {
  if (value === null || value === undefined) return "";
  const two = scale.middle !== undefined;
  const share = two ? (value - scale.middle) / (scale.high - scale.middle) : (value - scale.low) / (scale.high - scale.low);
  const strength = Math.min(Math.abs(two ? share : Math.max(share, 0)), 1) * 0.75;
  const hue = two && share < 0 ? "--minus" : "--plus";
  return `rgba(${style(hue)}, ${strength.toFixed(3)})`;
}

/** Return the branches of a session whose tokens form a tree: tokens that an earlier branch has, and the others. */
function branchesOf({ follows, ids }) {
  if (!follows || follows.every((before, i) => before === i - 1)) return null;
  const followed = new Set(follows), seen = new Set();
  const paths = [...ids.keys()].filter((i) => !followed.has(i)).map((leaf) => {
    const path = [];
    for (let i = leaf; i >= 0; i = follows[i]) path.push(i);
    return path.reverse();
  });
  return paths.sort((a, b) => a[0] - b[0]).map((path) => {
    const shared = path.filter((i) => seen.has(i)), own = path.filter((i) => !seen.has(i));
    for (const i of own) seen.add(i);
    return { shared, own, root: follows[path[0]] === -1 ? "after the prompt" : "with a context of its own" };
  });
}

/** Return the tokens of a sample, branch by branch, with what an earlier branch shows folded. */
function tokensOf(sample, name, scale) {
  const box = (tokens) => boxOf(tokens, sample, name, scale);
  const branches = branchesOf(sample.tokens);
  if (!branches) return box([...sample.tokens.ids.keys()]);
  const unfold = (tokens) => ({ target }) => { if (target.children.length === 1) target.append(box(tokens)); };
  return el("ol", { class: "branches" }, branches.map(({ shared, own, root }) => el("li", {}, el("small", {}, root),
    shared.length ? el("details", { ontoggle: unfold(shared) }, el("summary", {}, `${short(shared.length)} tokens of an earlier branch`)) : "",
    box(own))));
}

/** Return some tokens of a sample; numbers show on hover, on focus by keyboard and on touch. */
function boxOf(tokens, sample, name, scale) {
  const numbers = numbersOf(sample);
  const values = numbers.get(name) ?? [];
  const box = el("div", { class: "tokens" });
  tokens.forEach((i) => {
    const id = sample.tokens.ids[i];
    const inserted = !sample.tokens.mask[i];
    const text = sample.tokens.texts[i];
    const shown = text === null ? `[${id}]` : visible(text).replace(/\n/g, "↵\n") || "∅";
    const token = el("span", { class: inserted ? "token inserted" : "token" }, shown);
    if (!inserted) token.style.backgroundColor = colourOf(values[i], scale);
    token.at = i;
    box.append(token);
  });
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "tokens of the response; arrow keys move");
  let current = null;
  const show = (token) => {
    current?.classList.remove("current");
    current = token ?? null;
    current?.classList.add("current");
    if (current) showTip(current, sample, current.at, numbers); else hideTip();
  };
  for (const kind of ["mouseover", "click"]) box.addEventListener(kind, (event) => show(event.target.closest(".token")));
  box.addEventListener("mouseleave", () => show(null));
  box.addEventListener("blur", () => show(null));
  box.addEventListener("keydown", (event) => {
    const next = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!next) return;
    event.preventDefault();
    const at = [...box.children].indexOf(current);
    show(box.children[current ? Math.min(Math.max(at + next, 0), box.children.length - 1) : 0]);
  });
  return box;
}

function showTip(token, sample, i, numbers) {
  const rows = ON_HOVER.filter(([name]) => numbers.has(name)).map(([name, label]) => {
    const value = numbers.get(name)[i];
    return el("tr", {}, el("th", {}, label), el("td", {}, value === null ? "not finite" : value.toPrecision(5)));
  });
  if (sample.tokens.versions) rows.push(el("tr", {}, el("th", {}, "policy version"), el("td", {}, sample.tokens.versions[i])));
  const tip = document.getElementById("tip");
  tip.replaceChildren(
    el("b", {}, visible(JSON.stringify(sample.tokens.texts[i] ?? null))),
    el("div", { class: "quiet" }, `token ${i + 1} of ${sample.tokens.ids.length}, id ${sample.tokens.ids[i]}`,
      sample.tokens.mask[i] ? "" : ", not sampled by the policy"),
    el("table", {}, rows));
  tip.hidden = false;
  const at = token.getClientRects()[0] ?? token.getBoundingClientRect();
  const left = Math.min(at.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const below = at.bottom + tip.offsetHeight + 8 < window.innerHeight;
  tip.style.left = `${Math.max(left, 8)}px`;
  tip.style.top = `${below ? at.bottom + 6 : Math.max(at.top - tip.offsetHeight - 6, 4)}px`;
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}

function legendOf(name, scale) {
  const two = scale.middle !== undefined;
  const from = two ? `rgba(${style("--minus")}, 0.75)` : "transparent";
  return el("div", { class: "scale" }, el("span", {}, short(scale.low)),
    el("span", { class: "ramp", style: { background: `linear-gradient(90deg, ${from}, ${two ? "transparent, " : ""}rgba(${style("--plus")}, 0.75))` } }),
    el("span", {}, short(scale.high)));
}
