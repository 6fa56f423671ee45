// Curves over rounds, bytes or seconds: hover shows every series, drag zooms all charts, keys do the same.

const charts = new Set();
const AXES = { rounds: "round", bytes: "MB sent and received, one seed", seconds: "seconds, one seed" };

const WHOLE = [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000];

function xOf(run) {
  if (view.x === "rounds") return run.rounds;
  const all = run[view.x].map(floats), scale = view.x === "bytes" ? 1e6 : 1;
  return run.rounds.map((_, i) => all.reduce((sum, seed) => sum + seed[i], 0) / all.length / scale);
}

// Where a curve's warmup ends; -1 where there is none to mark.
const warmupAt = (line) => (line.run.warmup && line.marks !== false ? line.run.rounds.findIndex((round) => round >= line.run.warmup) : -1);

// spec: title, say, lines() -> [{ run, x, seeds: [[...]], label }], percent, target, log, fixed
function lineChart(spec) {
  const plot = el("div", { class: "plot", tabindex: "0", role: "group", "aria-roledescription": "chart",
    "aria-label": spec.title + ". Arrow keys read values, plus and minus zoom, 0 shows all." });
  const card = el("figure", { class: "card" + (spec.wide ? " wide" : "") },
    el("header", {}, el("h3", {}, spec.title), spec.control ? spec.control() : null), plot,
    el("figcaption", { class: "say" }, spec.say || ""), behind(spec.title, () => asTable()));
  let chart = null, lines = [], grid = [], own = [];
  const factor = spec.percent ? 100 : 1, unit = spec.percent ? " %" : "";

  function gather() {
    lines = spec.lines();
    grid = [...new Set(lines.flatMap((line) => Array.from(line.x)))].sort((a, b) => a - b);
    own = lines.map((line) => {
      const seeds = line.seeds.map((values) => resample(line.x, values, grid).map((v) => (v === null ? null : factor * v)));
      const of = (reduce) => grid.map((_, i) => {
        const known = seeds.map((seed) => seed[i]).filter((value) => value !== null);
        return known.length ? reduce(known) : null;
      });
      return { line, seeds, mean: of((v) => v.reduce((a, b) => a + b, 0) / v.length), low: of((v) => Math.min(...v)), high: of((v) => Math.max(...v)) };
    });
  }

  function draw() {
    if (!card.isConnected) return;
    gather();
    const series = [{}], bands = [], data = [grid];
    const add = (values, options) => { data.push(values); series.push({ spanGaps: true, points: { show: false }, ...options }); return data.length - 1; };
    for (const found of own) {
      const color = tint(found.line.run), dash = found.line.dash || [];
      if (found.seeds.length > 1 && view.spread === "band") {
        const high = add(found.high, { stroke: "transparent", width: 0 }), low = add(found.low, { stroke: "transparent", width: 0 });
        bands.push({ series: [high, low], fill: color + (isDark() ? "38" : "24") });
      }
      if (view.spread === "seeds" && found.seeds.length > 1) found.seeds.forEach((values) => add(values, { stroke: color + "c0", width: 1.1, dash }));
      else add(found.mean, { stroke: color, width: 2.2, dash });
    }
    const width = Math.max(200, plot.clientWidth), height = Math.round(Math.max(210, Math.min(spec.wide ? 460 : 340, width * (spec.wide ? 0.42 : 0.58))));
    const axis = { stroke: () => css("--muted"), grid: { stroke: () => css("--grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    chart?.destroy();
    chart = new uPlot({
      width, height, series, bands, legend: { show: false }, padding: [own.some(({ line }) => warmupAt(line) >= 0) ? 24 : 10, 14, 0, 0],
      scales: { x: { time: false, range: (u, low, high) => view.zoom || [low, high > low ? high : low + 1] },
        y: spec.log ? { distr: 3 } : { range: (u, low, high) => bounds(low, high) } },
      axes: [{ ...axis, label: AXES[view.x], labelFont: "12px system-ui, sans-serif", labelSize: 20, size: 34, ...(view.x === "rounds" ? { incrs: WHOLE } : {}), values: (u, v) => v.map((x) => (x === null ? null : whole(x))) },
        { ...axis, size: 52, values: (u, v) => v.map((y) => (y === null ? null : whole(y) + unit)) }],
      cursor: { y: false, drag: { x: true, y: false, dist: 6 }, points: { show: false }, sync: { key: "runs", scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } } },
      hooks: { draw: [marks], setScale: [zoomed], setCursor: [pointed] },
    }, data, plot);
    chart.over.addEventListener("mouseleave", hideTip);
  }

  function bounds(low, high) {
    if (low === null || high === null || low === undefined) return [0, 1];
    if (spec.fixed) return spec.fixed;
    if (spec.zero) { low = Math.min(low, 0); high = Math.max(high, 0); }
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return spec.percent ? [Math.max(0, low - room), Math.min(100.6, high + room)] : [low - room, high + room];
  }

  function marks(u) {
    const context = u.ctx, ratio = devicePixelRatio || 1, box = u.bbox;
    context.save();
    context.beginPath(); context.rect(box.left, box.top, box.width, box.height); context.clip();
    context.lineWidth = ratio; context.textAlign = "left"; context.textBaseline = "alphabetic";
    context.font = `${11 * ratio}px system-ui, sans-serif`;
    const line = (x0, y0, x1, y1, color, dash) => { context.strokeStyle = color; context.setLineDash(dash.map((d) => d * ratio)); context.beginPath(); context.moveTo(x0, y0); context.lineTo(x1, y1); context.stroke(); };
    if (spec.target !== undefined) {
      const y = u.valToPos(factor * spec.target, "y", true);
      line(box.left, y, box.left + box.width, y, css("--muted"), [6, 4]);
      context.fillStyle = css("--muted"); context.fillText(`target ${whole(factor * spec.target)}${unit}`, box.left + 6 * ratio, y + 14 * ratio);
    }
    if (spec.zero) { const y = u.valToPos(0, "y", true); line(box.left, y, box.left + box.width, y, css("--muted"), []); }
    const ends = new Map();
    for (const { line: one } of own) {
      const at = warmupAt(one);
      if (at >= 0) {
        const x = Math.round(u.valToPos(xOf(one.run)[at], "x", true)), place = (ends.get(x) || 0) + 1;
        ends.set(x, place);
        line(x + place - 1, box.top, x + place - 1, box.top + box.height, tint(one.run), [2, 3]);
      }
    }
    context.restore();
    // above the plot, where no curve is
    context.save();
    context.font = `${11 * ratio}px system-ui, sans-serif`; context.fillStyle = css("--muted"); context.textAlign = "center"; context.textBaseline = "alphabetic";
    const words = "warmup ends", wide = context.measureText(words).width;
    let free = -Infinity;
    for (const x of [...ends.keys()].sort((a, b) => a - b)) {
      if (x < box.left || x > box.left + box.width || x - wide / 2 < free) continue;
      context.fillText(words, Math.max(box.left + wide / 2, Math.min(x, box.left + box.width - wide / 2)), box.top - 7 * ratio);
      free = x + wide / 2 + 8 * ratio;
    }
    context.restore();
  }

  function zoomed(u, key) {
    if (key !== "x" || zoomed.busy || u.scales.x.min === undefined) return;
    const { min, max } = u.scales.x, all = min <= grid[0] && max >= grid[grid.length - 1];
    const wanted = all ? null : [min, max];
    if (String(wanted) === String(view.zoom)) return;
    setZoom(wanted);
  }

  function rowsAt(index) {
    return own.map((found) => {
      const mean = found.mean[index], low = found.low[index], high = found.high[index];
      const span = found.seeds.length > 1 && low !== null ? ` (${brief(low)} to ${brief(high)})` : "";
      return { line: found.line, text: mean === null ? "–" : brief(mean) + unit + span, mean };
    });
  }
  const nameX = (x) => (view.x === "rounds" ? `round ${brief(x).replace(/\.\d+$/, "")}` : view.x === "bytes" ? `${brief(x)} MB` : `${brief(x)} s`);

  function pointed(u) {
    const index = u.cursor.idx;
    if (index === null || index === undefined || u.cursor.left < 0) { if (plot.matches(":hover, :focus")) hideTip(); return; }
    if (!plot.matches(":hover") && document.activeElement !== plot) return;
    if (!plot.matches(":hover") && document.querySelector(".plot:hover")) return;
    const box = u.over.getBoundingClientRect(), rows = rowsAt(index);
    showTip(box.left + u.cursor.left, box.top + Math.max(0, u.cursor.top), el("b", {}, nameX(grid[index])),
      el("table", {}, rows.map((row) => el("tr", {}, el("td", {}, chip(row.line.run), row.line.label), el("td", {}, row.text)))));
  }

  plot.addEventListener("keydown", (event) => {
    if (!chart || !grid.length) return;
    const { min, max } = chart.scales.x, width = max - min;
    const at = chart.cursor.idx ?? grid.findIndex((x) => x >= min), step = event.shiftKey ? 10 : 1;
    const moves = { ArrowRight: at + step, ArrowLeft: at - step, Home: grid.findIndex((x) => x >= min), End: grid.findLastIndex((x) => x <= max) };
    if (event.key in moves) {
      const next = Math.max(0, Math.min(grid.length - 1, moves[event.key]));
      chart.setCursor({ left: chart.valToPos(grid[next], "x"), top: chart.over.clientHeight / 3 });
      say(`${nameX(grid[next])}: ` + rowsAt(next).map((row) => `${row.line.label} ${row.text}`).join(", "));
    } else if (event.key === "+" || event.key === "=" || event.key === "-") {
      const middle = chart.cursor.left >= 0 && chart.cursor.idx !== null ? chart.posToVal(chart.cursor.left, "x") : (min + max) / 2, part = event.key === "-" ? width : width / 4;
      const wanted = [Math.max(grid[0], middle - part), Math.min(grid[grid.length - 1], middle + part)];
      setZoom(wanted[0] <= grid[0] && wanted[1] >= grid[grid.length - 1] ? null : wanted);
    } else if (event.key === "0" || event.key === "Escape") { setZoom(null); hideTip(); }
    else return;
    event.preventDefault();
  });
  plot.addEventListener("blur", hideTip);

  function asTable() {
    gather();
    const step = Math.max(1, Math.ceil(grid.length / 400)), places = grid.map((_, i) => i).filter((i) => i % step === 0 || i === grid.length - 1);
    return table([AXES[view.x], ...own.map((found) => found.line.label)], places.map((i) => [whole(grid[i]), ...rowsAt(i).map((row) => row.text)]), spec.title);
  }

  const rescale = (zoom) => {
    if (!chart || !grid.length) return;
    zoomed.busy = true;
    chart.setScale("x", zoom ? { min: zoom[0], max: zoom[1] } : { min: grid[0], max: grid[grid.length - 1] });
    zoomed.busy = false;
  };
  charts.add({ rescale, get alive() { return card.isConnected; } });
  redraw.add(draw);
  let known = 0;
  new ResizeObserver(() => { if (Math.abs(plot.clientWidth - known) > 2) { known = plot.clientWidth; draw(); } }).observe(plot);
  return card;
}

function setZoom(zoom) {
  view.zoom = zoom;
  byId("unzoom").hidden = !zoom;
  for (const chart of charts) if (chart.alive) chart.rescale(zoom);
}

const curveLines = (key) => () => shown().filter((run) => run.curves[key]).map((run) => ({ run, label: run.label, x: xOf(run), seeds: run.curves[key].map(floats), dash: dashOf(run) }));
// two labels share a colour only beyond the eighth; then a dash tells them apart
const dashOf = (run) => (doc.now.runs.findIndex((other) => other.light === run.light) === doc.now.runs.indexOf(run) ? [] : [6, 3]);

// Rows of dots with a mean and an interval: the picture at the top.
function dotRows(rows, options) {
  const place = el("div", { class: "dots" });
  const draw = () => {
    if (!place.isConnected) return;
    const width = Math.max(260, place.clientWidth), narrow = width < 620, left = narrow ? 8 : Math.min(260, width * 0.26), right = narrow ? 8 : 30 + 7.4 * Math.max(...rows().map((row) => row.text.length));
    const step = narrow ? 78 : 46, height = rows().length * step + 44, all = rows().flatMap((row) => [...row.values, row.low, row.high]).filter(Number.isFinite);
    if (options.zero) all.push(0);
    let low = Math.min(...all), high = Math.max(...all);
    const room = (high - low || 1) * 0.08; low -= room; high += room;
    const at = (value) => left + ((value - low) / (high - low)) * (width - left - right);
    const made = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": options.label });
    const ticks = uPlotTicks(low, high, narrow ? 4 : 7);
    for (const tick of ticks) made.append(svg("line", { x1: at(tick), x2: at(tick), y1: 6, y2: height - 36, class: "axis" }),
      svg("text", { x: at(tick), y: height - 20, "text-anchor": "middle", class: "soft" }, (options.zero ? signed(tick, decimals(ticks)) : number(tick, decimals(ticks)))));
    made.append(svg("text", { x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle", class: "soft" }, options.axis));
    if (options.zero) made.append(svg("line", { x1: at(0), x2: at(0), y1: 2, y2: height - 34, class: "zero", "stroke-width": 1.5 }));
    rows().forEach((row, i) => {
      const y = i * step + (narrow ? 56 : 26), color = tint(row.run), halo = { "paint-order": "stroke", stroke: css("--card"), "stroke-width": 5 }, label = narrow ? { x: left, y: y - 38, ...halo } : { x: left - 14, y: y + 4.5, "text-anchor": "end" };
      made.append(svg("text", { ...label, "font-weight": 620 }, cut(row.run.label, (narrow ? width : left) / 7.8)));
      made.append(svg("text", narrow ? { x: left, y: y - 19, class: "soft", ...halo } : { x: width - right + 16, y: y + 4.5 }, row.text));
      if (row.low !== null && row.low !== undefined) made.append(svg("line", { x1: at(row.low), x2: at(row.high), y1: y, y2: y, stroke: color, "stroke-width": 7, "stroke-linecap": "round", opacity: 0.32 }));
      for (const value of row.values) made.append(svg("circle", { cx: at(value), cy: y, r: 3.4, fill: color, opacity: 0.75 }));
      if (row.mean !== null) made.append(svg("rect", { x: at(row.mean) - 5.5, y: y - 5.5, width: 11, height: 11, fill: color, stroke: css("--card"), "stroke-width": 1.5, transform: `rotate(45 ${at(row.mean)} ${y})` }));
    });
    place.replaceChildren(made);
  };
  redraw.add(draw);
  let known = 0;
  new ResizeObserver(() => { if (Math.abs(place.clientWidth - known) > 2) { known = place.clientWidth; draw(); } }).observe(place);
  return place;
}
const cut = (text, length) => (text.length > length ? text.slice(0, Math.max(3, length - 1)) + "…" : text);
function uPlotTicks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw)), step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + 1e-9; tick += step) found.push(Math.abs(tick) < step / 1e6 ? 0 : tick);
  return found;
}
const decimals = (ticks) => (ticks.length < 2 ? 1 : Math.max(0, Math.min(4, -Math.floor(Math.log10(ticks[1] - ticks[0]) + 1e-9))));
