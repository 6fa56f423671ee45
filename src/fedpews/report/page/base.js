"use strict";
// What all parts of the page use. Text from the document is only ever put on the page as text.

const doc = { now: JSON.parse(document.getElementById("document").textContent) };
const view = { x: "rounds", spread: "band", hidden: new Set(), zoom: null, client: null, run: null, seed: null, round: null };
const redraw = new Set();

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.flat());
  return made;
}

const byId = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isDark = () => document.documentElement.dataset.theme === "dark";
const tint = (run) => (isDark() ? run.dark : run.light);
const chip = (run) => {
  const made = el("span", { class: "chip", "aria-hidden": "true" });
  made.style.background = tint(run);
  return made;
};
const shown = () => doc.now.runs.filter((run) => !view.hidden.has(run.label));

function bytesOf(text) {
  const raw = atob(text), found = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) found[i] = raw.charCodeAt(i);
  return found;
}
const decoded = new Map();
function remembered(kind, text, make) {
  const key = kind + text;
  if (!decoded.has(key)) decoded.set(key, make(text));
  return decoded.get(key);
}
const floats = (text) => remembered("f", text, () => new Float32Array(bytesOf(text).buffer));

function number(value, digits = 2) {
  return value === null || value === undefined || !Number.isFinite(value) ? "–" : value.toFixed(digits);
}
function brief(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1)
    : size >= 0.1 || size === 0 ? value.toFixed(2) : value.toPrecision(2);
}
const whole = (value) => brief(value).replace(/\.0+$/, "");
const span = (values) => [...new Set([Math.min(...values), Math.max(...values)])].map((v) => v.toLocaleString("en")).join(" to ");
const signed = (value, digits = 2) => (value > 0 ? "+" : value < 0 ? "−" : "") + number(Math.abs(value), digits);

// Straight lines between known points; nothing outside of them.
function resample(xs, ys, grid) {
  const found = new Array(grid.length).fill(null);
  let at = 0;
  for (let i = 0; i < grid.length; i++) {
    const x = grid[i];
    if (!xs.length || x < xs[0] || x > xs[xs.length - 1]) continue;
    while (at < xs.length - 2 && xs[at + 1] < x) at++;
    const a = xs[at], b = xs[Math.min(at + 1, xs.length - 1)], low = ys[at], high = ys[Math.min(at + 1, ys.length - 1)];
    const value = x <= a ? low : x >= b ? high : low + ((high - low) * (x - a)) / (b - a);
    found[i] = Number.isFinite(value) ? value : null;
  }
  return found;
}

function table(head, rows, caption) {
  const made = el("table", {}, caption ? el("caption", { class: "unseen" }, caption) : null,
    el("thead", {}, el("tr", {}, head.map((cell) => el("th", { scope: "col" }, cell)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) => el(i ? "td" : "th", i ? { "data-head": head[i] } : { scope: "row" }, cell))))));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption || "Table" }, made);
}
// The table behind a chart, made when somebody opens it.
function behind(name, make) {
  const place = el("div");
  const details = el("details", { class: "data", ontoggle: () => details.open && place.replaceChildren(make()) }, el("summary", {}, "Table"), place);
  redraw.add(() => details.isConnected && details.open && place.replaceChildren(make()));
  details.setAttribute("aria-label", "Numbers of: " + name);
  return details;
}

const tip = byId("tip");
function showTip(x, y, ...content) {
  tip.replaceChildren(...content);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width > innerWidth - 6 ? x - box.width - 16 : x + 16;
  tip.style.left = Math.max(6, Math.min(left, innerWidth - box.width - 6)) + "px";
  tip.style.top = Math.max(6, Math.min(y - box.height / 2, innerHeight - box.height - 6)) + "px";
}
const hideTip = () => { tip.hidden = true; };
let saying = 0;
function say(text) { // for screen readers, once the keys rest
  clearTimeout(saying);
  saying = setTimeout(() => { byId("said").textContent = text; }, 250);
}

function segments(name, options, chosen, choose) {
  const id = "choice-" + name.replace(/\W/g, "");
  return el("fieldset", { class: "group" }, el("legend", { class: "unseen" }, name), el("span", { class: "name", "aria-hidden": "true" }, name),
    el("span", { class: "segments" }, Object.entries(options).map(([value, label]) => el("label", {},
      el("input", { type: "radio", name: id, value, checked: value === chosen, onchange: () => choose(value) }), el("span", {}, label)))));
}
function choice(name, options, chosen, choose) {
  const box = el("select", { "aria-label": name, onchange: () => choose(box.value) },
    options.map(([value, label]) => el("option", { value, selected: String(value) === String(chosen) }, label)));
  return el("label", { class: "group" }, el("span", { class: "name" }, name), box);
}
