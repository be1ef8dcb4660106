"use strict";
// Elements and numbers. Texts of runs become text nodes: nothing here parses HTML.

/** Return an element; attributes whose name starts with "on" are listeners, children are elements or texts. */
function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(element.style, value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

function svg(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Make control characters visible: those that reverse text could make an answer look like another one. */
function visible(text) {
  return String(text ?? "").replace(
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g,
    (character) => `[U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}]`,
  );
}

/** Return three or four significant figures, as the terminal shows them. */
function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en");
  if (size < 0.001 || size >= 1e7) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size >= 10 ? value.toFixed(1) : value.toFixed(3);
}

/** Return the first or last characters of a text on one line. */
function excerpt(text, length, end = false) {
  const line = visible(text ?? "").replace(/\s+/g, " ").trim();
  if (line.length <= length) return line;
  return end ? `…${line.slice(-length)}` : `${line.slice(0, length)}…`;
}

function select(label, options, value, onchange) {
  const list = el("select", { "aria-label": label, onchange: (event) => onchange(event.target.value) },
    options.map(([key, text]) => el("option", { value: key, selected: String(key) === String(value) }, text)));
  return el("label", {}, el("span", {}, label), list);
}

function quantile(sorted, share) {
  if (!sorted.length) return 0;
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

function mean(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
