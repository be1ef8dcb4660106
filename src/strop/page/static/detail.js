"use strict";
// One sample token by token, its group compared, and its prompt followed over the steps.

let measure = "advantages";

async function detailView(parameters) {
  const place = placeOf(parameters);
  const row = Number(parameters.get("row")), show = parameters.get("show") ?? "sample";
  const [sample] = await source.rows(place.run.number, place.kind, place.step, [row], true);
  if (!sample) throw new Error(`step ${place.step} has no sample ${row} here`);
  const thumbnails = await picturesOf(place, [sample]);
  const prompt = promptParts(sample).map((part) => part.number
    ? el("span", { class: "picture", title: visible(part.words) }, `picture ${part.number}, ${short(part.tokens)} tokens`) : visible(part));
  const tab = (name, label) => el("a", { href: addressOf(place, { row, show: name }), class: show === name ? "on" : "" }, label);
  const view = el("div", { class: "detail" },
    el("div", { class: "controls" },
      el("a", { href: addressOf(place), class: "back" }, `‹ ${KIND_NAMES[place.kind]}, step ${place.step}`),
      el("span", { class: "tabs" }, tab("sample", "Sample"), tab("group", "Its group"), tab("steps", "Over the steps"))),
    el("section", { class: "text" }, el("h2", {}, "Prompt"), gallery(sample, thumbnails, true), el("pre", { class: "prompt" }, prompt),
      sample.ground_truth === null ? "" : el("p", { class: "truth" }, el("span", {}, "Ground truth"), " ", visible(sample.ground_truth))));
  if (show === "steps") view.append(await overSteps(place, sample));
  else view.append(compared(show === "group" ? await groupOf(place, sample) : [sample], place));
  return view;
}

/** Return the samples of the same prompt in this step, with their tokens. */
async function groupOf(place, sample) {
  const found = await source.columns(place.run.number, place.kind, place.step);
  const uids = new Map(found.columns).get("uid");
  const rows = uids ? [...uids.keys()].filter((row) => uids[row] === sample.uid).slice(0, 64) : [sample.row];
  return source.rows(place.run.number, place.kind, place.step, rows, true);
}

/** Return samples side by side, coloured on one scale, with a choice of what colours them. */
function compared(samples, place) {
  const box = el("div", {});
  const known = [...MEASURES].filter(([name]) => samples.some((sample) => numbersOf(sample).has(name)));
  if (known.length && !known.some(([name]) => name === measure)) measure = known[0][0];
  const fill = () => {
    hideTip();
    const scale = known.length ? scaleOf(measure, samples) : { low: 0, high: 1 };
    box.replaceChildren(
      el("div", { class: "controls" },
        known.length ? select("Colour by", known.map(([name, { label }]) => [name, label]), measure, (value) => { measure = value; fill(); }) : "",
        known.length ? legendOf(measure, scale) : "",
        samples.length > 1 ? el("span", { class: "quiet" }, groupFacts(samples)) : ""),
      el("div", { class: samples.length > 1 ? "cards several" : "cards" }, samples.map((sample) => card(sample, scale, place, samples.length > 1))));
  };
  fill();
  return box;
}

function groupFacts(samples) {
  const scores = samples.map((sample) => sample.score).filter((score) => score !== null);
  if (!scores.length) return `${samples.length} samples`;
  const middle = mean(scores);
  const deviation = Math.sqrt(mean(scores.map((score) => (score - middle) ** 2)));
  return `${samples.length} samples, score ${short(middle)} ± ${short(deviation)}, length ${short(mean(samples.map((sample) => sample.length)))}`;
}

function card(sample, scale, place, linked) {
  const numbers = numbersOf(sample).get(measure);
  const own = numbers ? mean(numbers.filter((value, i) => sample.tokens.mask[i])) : null;
  const facts = [
    ["score", short(sample.score)], ...sample.parts.filter(([, value]) => value !== null).map(([name, value]) => [visible(name.replace("reward/", "")), short(value)]),
    ["tokens", short(sample.length)], ...(own === null ? [] : [[`mean ${MEASURES.get(measure).label}`, short(own)]]),
  ];
  const name = visible(`${sample.uid ?? ""} · row ${sample.row}`);
  return el("article", { class: "card" },
    el("header", {}, linked ? el("a", { href: addressOf(place, { row: sample.row, show: "sample" }) }, name) : el("b", {}, name),
      facts.map(([label, value]) => el("span", {}, el("small", {}, label), " ", value)),
      sample.ended_by ? el("span", {}, el("small", {}, "ended by"), " ", sample.ended_by) : "",
      sample.truncated ? el("em", {}, "cut at the limit") : "", sample.reward_failed ? el("em", {}, "not scored") : "",
      sample.hidden_tokens ? el("em", {}, `${sample.hidden_tokens} hidden from the reward`) : ""),
    turnsOf(sample), tokensOf(sample, measure, scale),
    sample.tokens.texts.includes(null)
      ? el("details", {}, el("summary", {}, "As text"), el("pre", {}, visible(sample.response_with_special_tokens || sample.response))) : "");
}

/** Return the turns of a sample as blocks: what the policy wrote, its calls, its reward, and what answered it. */
function turnsOf(sample) {
  if (!sample.conversation) return "";
  const { turns, error, rewards = [] } = JSON.parse(sample.conversation);
  const first = turns.length - rewards.length;  // a single reward is the last turn's
  const values = (call) => Object.entries(call.arguments).map(([name, value]) => `${name}=${JSON.stringify(value)}`).join(", ");
  return el("ol", { class: "turns" }, turns.map((turn, i) => el("li", {}, el("pre", {}, visible(turn.text)),
    turn.calls.map((call) => el("code", {}, visible(`${call.name}(${values(call)})`))),
    rewards.length && i >= first ? el("small", {}, ` reward ${short(rewards[i - first])}`) : "",
    turn.answers.map((answer) => el("pre", { class: "answer" }, el("small", {}, `${answer.role} `), visible(typeof answer.content === "string" ? answer.content : answer.content.map((part) => part.text ?? "[picture]").join("")))))),
    error ? el("li", {}, el("em", {}, visible(error))) : "");
}

/** Return the scores of one prompt over the steps, and its responses. */
async function overSteps(place, sample) {
  const found = await source.history(place.run.number, place.kind, place.step, sample.row);
  const steps = [...new Set(found.map((one) => one.step))];
  const of = (step, key) => mean(found.filter((one) => one.step === step).map((one) => one[key]));
  const panel = (title, unit, key) => el("section", { class: "panel" }, el("h2", {}, title, el("small", {}, unit)),
    chart([{ label: title, x: steps, y: steps.map((step) => of(step, key)), colour: "--c1" }], { height: 140 }));
  return el("div", {},
    el("p", { class: "quiet" }, `${found.length} samples of this prompt in ${steps.length} of ${place.steps.length} steps that have a file`),
    el("div", { class: "panels" }, panel("Score", "mean of the prompt's samples", "score"), panel("Length", "tokens, mean", "length")),
    el("ol", { class: "list" }, found.map((one) => el("li", {}, el("a", { href: addressOf({ ...place, step: one.step }, { row: one.row, show: "sample" }) },
      el("span", { class: "uid" }, `step ${one.step}`),
      el("span", { class: "facts" }, el("b", {}, short(one.score)), el("span", {}, `${short(one.length)} tokens`), one.truncated ? el("em", {}, "cut") : ""),
      el("span", { class: "response wide" }, excerpt(one.response_with_special_tokens || one.response, 300)))))));
}
