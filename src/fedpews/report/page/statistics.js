// The page of a federation's statistics.

const count = (value) => (value === null ? `<${doc.now.min_count}` : value.toLocaleString("en"));
const share = (part) => `color-mix(in srgb, var(--accent) ${Math.round(100 * part)}%, transparent)`;
const shade = (part, text) => {
  const cell = el("td", {}, text);
  if (part > 0) cell.style.background = share(0.08 + 0.5 * part);
  return cell;
};
const scroll = (name, content) => el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, content);
const head = (cells) => el("thead", {}, el("tr", {}, cells.map((cell) => el("th", { scope: "col" }, cell))));
const named = (site) => el("span", { class: "run" }, chip(site), site.name);

function verdict() {
  const [first, ...rest] = doc.now.headline, sites = doc.now.sites;
  byId("sentence").replaceChildren(el("h1", {}, first), ...rest.map((text) => el("p", { class: "more" }, text)));
  const rows = sites.map((site) => {
    const there = site.classes.filter((n) => n !== 0).length;
    return [named(site), site.samples.toLocaleString("en"), site.classes.length ? `${there} of ${site.classes.length}` : "–", site.bytes.toLocaleString("en")];
  });
  byId("numbers").replaceChildren(table(["site", "training samples", "classes", "bytes that left it"], rows, "Sites"));
}

// Classes down, sites across; the shade is a class's share of its site.
function classes() {
  const { sites, classes: names } = doc.now;
  if (!names.length) { byId("class-view").replaceChildren(el("p", { class: "say" }, "The labels are numbers, not classes; see the inputs' last features.")); return; }
  const most = sites.map((site) => Math.max(1, ...site.classes.map((n) => n || 0)));
  const body = names.map((name, k) => el("tr", {}, el("th", { scope: "row" }, name), sites.map((site, i) => shade((site.classes[k] || 0) / most[i], site.classes[k] === 0 ? "·" : count(site.classes[k])))));
  byId("class-view").replaceChildren(el("figure", { class: "card" }, scroll("Classes at each site", el("table", {}, head(["class", ...sites.map(named)]), el("tbody", {}, body))),
    el("figcaption", { class: "say" }, `Training samples of each class. · is none; <${doc.now.min_count} is suppressed, together with the next smallest cell if the total would give it away.`)));
}

function distances() {
  const names = doc.now.sites.map(named);
  byId("distance-view").replaceChildren(...doc.now.distances.map((one) => el("figure", { class: "card" }, el("header", {}, el("h3", {}, one.title)),
    scroll(`Distances of ${one.title}`, el("table", {}, head(["", ...doc.now.sites.map(named)]), el("tbody", {}, one.values.map((row, i) => el("tr", {}, el("th", { scope: "row" }, names[i].cloneNode(true)), row.map((value, j) => (i === j ? el("td", {}, "–") : shade(value, number(value, 2))))))))),
    el("figcaption", { class: "say" }, `0: the same, 1: nothing in common. ${one.say}`))));
}

// A feature's histograms over each other: a step line for each site, its share of values per cell.
function distribution(feature) {
  const plot = el("div", { class: "plot" });
  const card = el("figure", { class: "card" }, el("header", {}, el("h3", {}, feature.name)), plot);
  const draw = () => {
    const width = Math.max(250, card.clientWidth - 38), height = 170, base = height - 22, cells = feature.edges.length + 1;
    const used = feature.sites.flatMap((site) => site.shares.map((value, i) => (value ? i : -1))).filter((i) => i >= 0);
    const first = Math.max(0, Math.min(...used) - 1), last = Math.min(cells - 1, Math.max(...used) + 1), step = (width - 8) / (last - first + 1);
    const top = Math.max(...feature.sites.flatMap((site) => site.shares)), x = (i) => 4 + (i - first) * step, y = (v) => base - (v / top) * (base - 8);
    const made = svg("svg", { width, height, role: "img", "aria-label": `Distribution of ${feature.name} at each site; the table below has means and deviations` });
    made.append(svg("line", { x1: 0, x2: width, y1: base, y2: base, class: "axis" }));
    const every = Math.max(1, Math.ceil(64 / step));
    for (let i = Math.max(1, first); i <= Math.min(last, cells - 1); i++) if ((i - 1) % every === 0 && x(i) > 16 && x(i) < width - 16) made.append(svg("text", { x: x(i), y: height - 5, "text-anchor": "middle", class: "soft" }, String(feature.edges[i - 1])));
    feature.sites.forEach((site, k) => {
      if (!site.shares.some(Boolean)) return;
      let path = `M ${x(first)} ${base}`;
      for (let i = first; i <= last; i++) path += ` L ${x(i)} ${y(site.shares[i])} L ${x(i + 1)} ${y(site.shares[i])}`;
      path += ` L ${x(last + 1)} ${base}`;
      made.append(svg("path", { d: path, fill: tint(doc.now.sites[k]), "fill-opacity": 0.12, stroke: tint(doc.now.sites[k]), "stroke-width": 1.8, "stroke-linejoin": "round" }, svg("title", {}, `${doc.now.sites[k].name}: ${brief(site.mean)} ± ${brief(site.deviation)}`)));
    });
    plot.replaceChildren(made);
  };
  if (feature.sites.some((site) => site.shares.some(Boolean))) {
    let width = 0;
    new ResizeObserver(() => { if (Math.abs(card.clientWidth - width) > 2) { width = card.clientWidth; draw(); } }).observe(card);
    redraw.add(() => card.isConnected && draw());
  } else plot.append(el("p", { class: "say" }, "Suppressed at every site."));
  return card;
}

function features() {
  const all = doc.now.features, shown = all.slice(0, doc.now.drawn), one = (site) => (site.mean === null ? "suppressed" : `${brief(site.mean)} ± ${brief(site.deviation)}`);
  const reach = (site) => (site.range ? `${site.range[0] === null ? "below" : site.range[0]} to ${site.range[1] === null ? "beyond" : site.range[1]}` : "–");
  const legend = el("ul", { class: "key wide" }, doc.now.sites.map((site) => el("li", {}, chip(site), site.name)));
  byId("feature-charts").replaceChildren(legend, ...shown.map(distribution));
  const gaps = all.some((feature) => feature.sites.some((site) => site.missing !== 0));
  const rows = all.flatMap((feature) => [...feature.sites.map((site, i) => [i ? "" : feature.name, named(doc.now.sites[i]), one(site), reach(site), ...(gaps ? [count(site.missing)] : [])]),
    ["", "all sites", one(feature), "", ...(gaps ? [""] : [])]]);
  byId("feature-table").replaceChildren(el("figure", { class: "card", style: "margin-top: 1.1rem" }, table(["feature", "site", "mean ± deviation", "range", ...(gaps ? ["missing"] : [])], rows, "Features at each site"),
    el("figcaption", { class: "say" }, `The range is that of the histogram's cells with at least ${doc.now.min_count} samples, so nobody's smallest or largest value. ${all.length > shown.length ? `Drawn are the first ${shown.length} of ${all.length} features.` : ""}`)));
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "☀" : "☾";
}
function build() {
  redraw.clear();
  verdict(); classes(); distances(); features();
  for (const draw of redraw) draw();
}
document.title = doc.now.title;
byId("nav").replaceChildren(...Object.entries({ verdict: "Advice", classes: "Classes", distances: "Distances", features: "Inputs" }).map(([id, name]) => el("a", { href: "#" + id }, name)));
const darkly = matchMedia("(prefers-color-scheme: dark)");
setTheme(darkly.matches ? "dark" : "light");
darkly.addEventListener("change", (event) => { setTheme(event.matches ? "dark" : "light"); build(); });
byId("theme").addEventListener("click", () => { setTheme(isDark() ? "light" : "dark"); build(); });
build();
