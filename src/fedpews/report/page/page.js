// The page itself: what stands where, light and dark, and news from a run that goes on.

function drawVerdict() {
  const [first, ...rest] = doc.now.headline;
  byId("sentence").replaceChildren(el("h1", {}, first.replace(/ %/g, "\u00a0%")), ...rest.map((text) => el("p", { class: "more" }, text)));
  byId("notes").replaceChildren(...doc.now.notes.map((text) => el("p", { class: "note" }, text)),
    ...doc.now.comparisons.filter((one) => one.sentence !== doc.now.headline.join(" ")).map((one) => el("p", { class: "say" }, one.sentence)));
  const numbers = doc.now.table.map((row, i) => [el("span", { class: "run" }, chip(doc.now.runs[i]), row[0]), ...row.slice(1)]);
  byId("numbers").replaceChildren(table(doc.now.columns.map((name) => ({ rounds: doc.now.target === null ? "rounds" : `rounds to ${doc.now.percent ? number(100 * doc.now.target, 0) + " %" : doc.now.target}`, seeds: "reached by", min: "minutes" }[name] || name)), numbers, "Runs side by side, mean ± standard deviation over seeds"));
}

function picture() {
  const compared = () => doc.now.comparisons.filter((one) => one.fair);
  const isPaired = compared().length > 0;
  const rows = () => isPaired
    ? compared().map((one) => ({ run: doc.now.runs[one.other], values: one.gains.map(([, gain]) => gain), mean: one.final.mean, low: one.final.seeds > 1 ? one.final.low : null, high: one.final.high,
      text: one.final.seeds > 1 ? `${signed(one.final.mean)} [${signed(one.final.low)}, ${signed(one.final.high)}]` : signed(one.final.mean) }))
    : doc.now.runs.map((run) => ({ run, values: run.final.by_seed, mean: run.final.mean, low: null, high: null, text: number(run.final.mean) + (doc.now.percent ? " %" : "") }));
  const base = isPaired ? doc.now.runs[compared()[0].base].label : "";
  const say = isPaired ? `${doc.now.percent ? "Points" : "Gain"} of final ${doc.now.metric} ${doc.now.percent ? "above" : "over"} ${base}, seed by seed: dots are seeds, the diamond their mean, the bar its 95 % interval. ${doc.now.rule}` : `Final ${doc.now.metric}: dots are seeds, the diamond their mean.`;
  const head = isPaired ? ["run", "mean gain", "from", "to", "seeds", "p (Holm)"] : ["run", `final ${doc.now.metric}, seed by seed`];
  const numbers = () => table(head, isPaired ? compared().map((one) => [doc.now.runs[one.other].label, signed(one.final.mean, 3), one.final.low === null ? "–" : signed(one.final.low, 3), one.final.high === null ? "–" : signed(one.final.high, 3), String(one.final.seeds), number(one.final.p, 4)])
    : doc.now.runs.map((run) => [run.label, run.final.by_seed.map((v) => number(v)).join(", ")]), say);
  byId("picture").replaceChildren(dotRows(rows, { zero: isPaired, axis: isPaired ? `${doc.now.percent ? "points above" : "gain over"} ${base}` : `final ${doc.now.metric}${doc.now.percent ? " (%)" : ""}`, label: say + " " + rows().map((row) => `${row.run.label}: ${row.text}`).join("; ") }), el("figcaption", {}, say), behind("the picture at the top", numbers));
}

function toolbar() {
  const legend = el("div", { class: "legend", role: "group", "aria-label": "Runs shown" });
  const fill = () => legend.replaceChildren(...doc.now.runs.map((run) => el("button", { type: "button", "aria-pressed": String(!view.hidden.has(run.label)), onclick: (event) => {
    if (view.hidden.has(run.label)) view.hidden.delete(run.label); else view.hidden.add(run.label);
    event.currentTarget.setAttribute("aria-pressed", String(!view.hidden.has(run.label)));
    redrawAll();
  } }, chip(run), run.label)));
  fill();
  redraw.add(() => { if (!legend.contains(document.activeElement)) fill(); });
  const seeds = doc.now.runs.some((run) => run.seeds.length > 1);
  byId("toolbar").replaceChildren(legend,
    segments("over", { rounds: "rounds", bytes: "bytes", seconds: "seconds" }, view.x, (value) => { view.x = value; setZoom(null); redrawAll(); }),
    ...(seeds ? [segments("seeds", { band: "mean and range", seeds: "each" }, view.spread, (value) => { view.spread = value; redrawAll(); })] : []),
    el("button", { type: "button", id: "unzoom", hidden: true, onclick: () => setZoom(null) }, "Show all"));
}

function curves() {
  const has = (key) => doc.now.runs.some((run) => run.curves[key]);
  const made = [lineChart({ title: doc.now.metric[0].toUpperCase() + doc.now.metric.slice(1), wide: true, percent: doc.now.percent, target: doc.now.target === null ? undefined : doc.now.target, lines: curveLines(doc.now.key), say: "The global model on the test data. Hover or use the arrow keys for values; drag to zoom, double-click to show all." })];
  const personal = `personal_${doc.now.key}`;
  if (has(personal)) made.push(lineChart({ title: `The clients' own models: ${doc.now.metric}`, percent: doc.now.percent, lines: curveLines(personal), say: "Each client's personal model on its own test samples, or on the classes it holds; mean over clients." }));
  const columns = Object.entries(doc.now.charts).filter(([key]) => has(key));
  const chart = ([key, { title, text, unit }]) => lineChart({ title, lines: curveLines(key), say: text, ...(unit === "share" ? { fixed: [-3, 103], percent: true } : { zero: unit === "cosine" }) });
  byId("curve-charts").replaceChildren(...made, ...columns.filter(([, column]) => column.unit !== "share").map(chart));
  byId("mask-charts").replaceChildren(...columns.filter(([, column]) => column.unit === "share").map(chart));
}

// Where values lie, with a little room, also when they are all the same.
function reach(values) {
  const low = Math.min(...values, Infinity), high = Math.max(...values, -Infinity);
  if (!Number.isFinite(low)) return [0, 1];
  const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}

function clients() {
  const known = doc.now.runs.filter((run) => run.clients.names.length), place = byId("client-charts");
  const missing = doc.now.runs.filter((run) => run.clients.missing).map((run) => el("p", { class: "say wide" }, `${run.label}: ${run.clients.missing}`));
  if (!known.length) { byId("clients").querySelector(".lead").hidden = true; place.replaceChildren(...missing); return; }
  const names = known.reduce((most, run) => (run.clients.names.length > most.length ? run.clients.names : most), []);
  const metric = doc.now.metric, percent = doc.now.percent, factor = percent ? 100 : 1, unit = percent ? " %" : "";
  const digits = (value) => (percent ? number(value) + unit : brief(value));
  const where = known[0].clients.own ? "on this client's own test samples" : "on the classes that this client holds";
  byId("clients").querySelector(".lead").textContent = `How well the global model serves each client: its ${metric} ${where}, mean over seeds.`;
  const there = known[0].clients.final.filter((value) => value !== null);
  const worst = Math.max(0, known[0].clients.final.indexOf(doc.now.higher ? Math.min(...there) : Math.max(...there)));
  if (view.client === null || view.client >= names.length) view.client = worst;
  const label = (i) => names[i];
  const chart = lineChart({ title: "One client over the rounds", percent, control: () => choice("client", names.map((name, i) => [i, name]), view.client, (value) => { view.client = Number(value); redrawAll(); }),
    lines: () => shown().filter((run) => run.clients.names.length > view.client).map((run) => { const at = new Map(run.rounds.map((round, i) => [round, i])), x = xOf(run); return { run, label: run.label, x: run.clients.rounds.map((round) => x[at.get(round)] ?? round), seeds: [floats(run.clients.values[view.client])], dash: dashOf(run) }; }), say: `The global model's ${metric} ${where}.` });
  const rows = () => names.map((name, i) => ({ name, runs: shown().filter((run) => run.clients.names.length > i).map((run) => ({ run, value: run.clients.final[i] === null ? null : factor * run.clients.final[i] })) }));
  const dots = el("div", { class: "scroll" });
  const card = el("figure", { class: "card" }, el("header", {}, el("h3", {}, "Every client at the end")), dots, el("figcaption", { class: "say" }, `The ${metric} ${where} after the last round, mean over seeds.`),
    behind("Every client", () => table(["client", ...shown().map((run) => run.label)], rows().map((row) => [row.name, ...row.runs.map((one) => digits(one.value))]), "Every client at the end")));
  const draw = () => {
    if (!card.isConnected) return;
    const width = Math.max(250, card.clientWidth - 38), left = Math.min(150, width * 0.34), step = Math.max(15, Math.min(80, 300 / names.length)), height = names.length * step + 30, ends = percent ? [0, 100] : reach(rows().flatMap((row) => row.runs.map((one) => one.value)).filter((v) => v !== null)), at = (v) => left + ((v - ends[0]) / (ends[1] - ends[0])) * (width - left - 24);
    const made = svg("svg", { width, height, role: "img", "aria-label": `Final ${metric} of every client; the table below has the numbers` });
    for (const tick of [0, 0.25, 0.5, 0.75, 1].map((part) => ends[0] + part * (ends[1] - ends[0]))) made.append(svg("line", { x1: at(tick), x2: at(tick), y1: 4, y2: height - 24, class: "axis" }), svg("text", { x: at(tick), y: height - 8, "text-anchor": "middle", class: "soft" }, percent ? tick + unit : brief(tick)));
    rows().forEach((row, i) => {
      const y = step / 2 + 4 + i * step, values = row.runs.map((one) => one.value).filter((value) => value !== null);
      made.append(svg("text", { x: 0, y: y + 4, class: "soft" }, cut(row.name, left / 7.2)));
      if (values.length > 1) made.append(svg("line", { x1: at(Math.min(...values)), x2: at(Math.max(...values)), y1: y, y2: y, class: "axis", "stroke-width": 3 }));
      // side by side, so that equal values hide no run
      const lane = Math.min(12, (step - 4) / row.runs.length), radius = Math.max(2, Math.min(5.5, row.runs.length > 1 ? lane / 2 : step / 3));
      row.runs.forEach((one, k) => one.value !== null && made.append(svg("circle", { cx: at(one.value), cy: y + (k - (row.runs.length - 1) / 2) * lane, r: radius, fill: tint(one.run) }, svg("title", {}, `${row.name}, ${one.run.label}: ${digits(one.value)}`))));
    });
    dots.replaceChildren(made);
  };
  dots.style.maxHeight = "26rem"; dots.style.overflowY = "auto";
  redraw.add(draw);
  let width = 0;
  new ResizeObserver(() => { if (Math.abs(card.clientWidth - width) > 2) { width = card.clientWidth; draw(); } }).observe(card);
  place.replaceChildren(card, chart, ...missing);
}

function split() {
  const made = doc.now.federations.map((one, place) => {
    const sizes = one.counts.map((row) => row.reduce((a, b) => a + b, 0)), held = one.counts.map((row) => row.filter(Boolean).length);
    const said = `${one.total.toLocaleString("en")} clients, ${one.classes.length} classes; a client holds ${span(sizes)} samples of ${span(held)} ${Math.max(...held) === 1 ? "class" : "classes"}. A dot's area is the number of samples.` + (one.total > one.clients.length ? ` Drawn are the first ${one.clients.length}.` : "");
    const dots = el("div", { class: "scroll split", tabindex: "0", role: "region", "aria-label": doc.now.federations.length > 1 ? `Split of the data, ${place + 1}` : "Split of the data" });
    const card = el("figure", { class: "card" }, el("header", {}, el("h3", {}, one.name || "Data")), dots, el("figcaption", { class: "say" }, said),
      behind("Who holds what", () => table(["client", ...one.classes, "samples"], one.counts.map((row, i) => [one.clients[i], ...row.map(String), String(sizes[i])]), "Who holds what")));
    const draw = () => dots.replaceChildren(splitDots(one, Math.max(250, card.clientWidth - 38)));
    let width = 0;
    new ResizeObserver(() => { if (Math.abs(card.clientWidth - width) > 2) { width = card.clientWidth; draw(); } }).observe(card);
    return card;
  });
  byId("split").replaceChildren(...(made.length ? made : [el("p", { class: "say" }, "How the samples are spread is not known here: they are at the clients, or the run was made by an older version.")]));
}

// A row for each client, a column for each class; classes in the order of the client that has most of them.
function splitDots(one, width) {
  const most = Math.max(1, ...one.counts.flat()), main = one.classes.map((_, k) => one.counts.reduce((best, row, i) => (row[k] > one.counts[best][k] ? i : best), 0));
  const order = one.classes.map((_, k) => k).sort((a, b) => main[a] - main[b] || a - b), left = Math.min(120, width * 0.3);
  const across = Math.max(9, (width - left - 12) / order.length), down = Math.max(12, Math.min(44, 420 / one.counts.length)), longest = Math.max(...one.classes.map((name) => name.length));
  const slanted = 7.2 * longest > across - 6, top = across < 12 ? 8 : slanted ? 20 + 5.6 * Math.min(13, longest) : 26, height = top + down * one.counts.length + 6;
  const made = svg("svg", { width: left + across * order.length + 12, height, role: "img", "aria-label": "Samples of every class at every client; the table below has the numbers" });
  order.forEach((k, at) => {
    const x = left + (at + 0.5) * across, text = cut(one.classes[k], slanted ? 13 : 99);
    if (across >= 12) made.append(svg("text", slanted ? { class: "soft", transform: `translate(${x + 4} ${top - 8}) rotate(-55)` } : { class: "soft", x, y: top - 10, "text-anchor": "middle" }, text));
  });
  one.counts.forEach((row, i) => {
    const y = top + (i + 0.5) * down;
    made.append(svg("line", { x1: left, x2: left + across * order.length, y1: y, y2: y, class: "axis" }), svg("text", { x: 0, y: y + 4, class: "soft" }, cut(one.clients[i], left / 7.4)));
    order.forEach((k, at) => row[k] && made.append(svg("circle", { cx: left + (at + 0.5) * across, cy: y, r: Math.max(0.8, Math.sqrt(row[k] / most) * Math.min(across, down) * 0.47), fill: css("--accent") }, svg("title", {}, `${one.clients[i]}, ${one.classes[k]}: ${row[k]}`))));
  });
  return made;
}

function config() {
  const rows = doc.now.settings.map(([key, values]) => ({ key, values, differs: new Set(values).size > 1 }));
  const lines = (some) => some.map((row) => el("tr", { class: row.differs ? "differs" : false }, el("td", { class: "text" }, el("code", {}, row.key)), row.values.map((value) => el("td", { class: "text" }, value))));
  const head = () => el("thead", {}, el("tr", {}, el("th", { scope: "col", class: "text" }, "key"), doc.now.runs.map((run) => el("th", { scope: "col", class: "text" }, run.label))));
  const grid = (some, name) => el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, el("table", {}, head(), el("tbody", {}, lines(some))));
  const differing = rows.filter((row) => row.differs);
  byId("config").replaceChildren(el("div", { class: "card" },
    doc.now.runs.length > 1 ? el("h3", {}, differing.length ? "What differs" : "Nothing differs but the folder") : null, differing.length ? grid(differing, "What differs between runs") : null,
    el("details", { open: doc.now.runs.length === 1 }, el("summary", {}, "Every key"), grid(rows, "Every key of the configuration"))),
    el("h3", { style: "margin: 1.4rem 0 .3rem" }, "Make it again"),
    ...doc.now.runs.map((run) => el("div", { class: "card", style: "margin-top:.7rem" }, el("header", {}, el("h3", {}, chip(run), run.label)),
      el("div", { class: "again" }, el("pre", {}, run.again.command), el("button", { type: "button", onclick: (event) => copy(event.currentTarget, run.again.command) }, "Copy")),
      el("details", {}, el("summary", {}, "config.toml"), el("pre", {}, run.again.config)))));
}
function copy(button, text) {
  const done = () => { button.textContent = "Copied"; setTimeout(() => { button.textContent = "Copy"; }, 1500); };
  if (navigator.clipboard) navigator.clipboard.writeText(text).then(done, () => getSelection().selectAllChildren(button.previousElementSibling));
  else getSelection().selectAllChildren(button.previousElementSibling);
}

function navigation() {
  const names = { verdict: "Result", curves: "Curves", clients: "Clients", masks: "Masks", data: "Data", settings: "Configuration" };
  byId("nav").replaceChildren(...Object.entries(names).map(([id, name]) => el("a", { href: "#" + id }, name)));
}

function masksSection() {
  const owned = masked().length > 0;
  if (owned) { maskView(byId("mask-view")); return; }
  const single = doc.now.runs.filter((run) => run.masks && run.masks.missing).map((run) => el("p", { class: "say" }, `${run.label}: ${run.masks.missing}`));
  byId("mask-view").replaceChildren(...(single.length ? single : [el("p", { class: "say" }, "No warmup: every client trains every neuron in every round.")]));
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "☀" : "☾";
  byId("theme").setAttribute("aria-label", theme === "dark" ? "Switch to light" : "Switch to dark");
}
function redrawAll() { for (const draw of redraw) draw(); }
const shape = (data) => JSON.stringify(data.runs.map((run) => [run.label, run.seeds, Object.keys(run.curves), run.clients.names.length, Boolean(run.masks && run.masks.rounds)]));

function build() {
  redraw.clear(); charts.clear(); decoded.clear();
  document.title = doc.now.title;
  navigation(); picture(); toolbar(); curves(); clients(); masksSection(); split(); config();
  redraw.add(drawVerdict);
  redrawAll();
}

const darkly = matchMedia("(prefers-color-scheme: dark)");
setTheme(darkly.matches ? "dark" : "light");
darkly.addEventListener("change", (event) => { setTheme(event.matches ? "dark" : "light"); redrawAll(); });
byId("theme").addEventListener("click", () => { setTheme(isDark() ? "light" : "dark"); redrawAll(); split(); config(); });
let before = null;
addEventListener("beforeprint", () => { before = document.documentElement.dataset.theme; setTheme("light"); redrawAll(); });
addEventListener("afterprint", () => { setTheme(before || "light"); redrawAll(); });
addEventListener("scroll", hideTip, { passive: true });
build();

// A live page asks its own server, on this machine, for what is new.
if (document.body.dataset.live === "true") {
  const status = byId("status");
  let tag = null;
  const tell = () => {
    const open = doc.now.runs.filter((run) => !run.finished);
    status.classList.toggle("live", open.length > 0);
    status.textContent = open.length ? open.map((run) => `${run.label} round ${run.round} of ${run.planned}`).join(", ") : "finished";
  };
  const ask = async () => {
    try {
      const answer = await fetch("data.json", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag");
        const news = await answer.json(), same = shape(news) === shape(doc.now);
        doc.now = news;
        decoded.clear();
        if (same) redrawAll(); else build();
      }
      tell();
    } catch { status.classList.remove("live"); status.textContent = "fedpews watch has stopped; this is the last update"; }
    setTimeout(ask, 2000);
  };
  tell();
  setTimeout(ask, 1000);
}
