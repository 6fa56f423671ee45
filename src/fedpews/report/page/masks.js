// Who owns which neurons, round by round: clients × neurons, layer by layer.

const BINS = 32;
const masked = () => doc.now.runs.filter((run) => run.masks && run.masks.rounds);

function bitsOf(one, neurons) {
  return remembered("b" + neurons + ":", one.owned, (text) => {
    const packed = bytesOf(text), rows = one.clients.length, found = [];
    for (let i = 0; i < rows; i++) {
      const row = new Uint8Array(neurons);
      for (let j = 0, at = i * neurons; j < neurons; j++, at++) row[j] = (packed[at >> 3] >> (7 - (at & 7))) & 1;
      found.push(row);
    }
    return found;
  });
}

function maskView(host) {
  const runOf = () => masked().find((run) => run.label === view.run) || masked()[0];
  const roundsOf = () => runOf().masks.rounds.filter((one) => one.seed === view.seed);
  const now = () => roundsOf().find((one) => one.round === view.round) || roundsOf()[roundsOf().length - 1];
  const neurons = () => runOf().masks.layers.reduce((sum, layer) => sum + layer.size, 0);
  const nameOf = (client) => runOf().masks.names[client] || `client ${client}`;

  const slider = el("input", { type: "range", id: "mask-round", min: 0, step: 1, "aria-label": "Round of the masks", oninput: () => { view.round = roundsOf()[Number(slider.value)].round; view.follow = Number(slider.value) === roundsOf().length - 1; draw(); } });
  const shownRound = el("output", { for: "mask-round" });
  const play = el("button", { type: "button", onclick: () => (timer ? stop() : start()) }, "Play");
  let timer = 0;
  const stop = () => { clearInterval(timer); timer = 0; play.textContent = "Play"; };
  const start = () => {
    if (Number(slider.value) >= Number(slider.max)) slider.value = 0;
    play.textContent = "Pause";
    timer = setInterval(() => { slider.value = Number(slider.value) + 1; slider.dispatchEvent(new Event("input")); if (Number(slider.value) >= Number(slider.max)) stop(); }, 450);
  };
  const picks = el("span", { class: "group" });
  const canvas = el("canvas", { class: "pixels", id: "mask-pixels", role: "img", tabindex: "0" });
  const pairs = el("canvas", { class: "pixels", id: "overlap-pixels", role: "img" });
  const facts = el("p", { class: "say", id: "mask-facts" }), key = el("ul", { class: "key" }), note = el("p", { class: "say" });
  const theta = el("div", { class: "charts", style: "margin-top: 1.1rem" }), pairsCard = el("figure", { class: "card" },
    el("header", {}, el("h3", {}, "Overlap of every two clients")), pairs,
    el("figcaption", { class: "say" }, "Neurons both own, of those either owns: 0 is nothing in common, 1 the same."), behind("Overlap", () => overlapTable()));
  host.replaceChildren(
    el("p", { class: "lead" }, "In the warmup each client trains only its own part of the network. A column is a hidden neuron, a row a client; the row below counts the owners of each neuron."),
    el("div", { class: "controls" }, picks, el("label", { class: "group", for: "mask-round" }, el("span", { class: "name" }, "round")), slider, shownRound, play),
    el("div", { class: "mask-grid" },
      el("figure", { class: "card" }, el("header", {}, el("h3", {}, "Who owns which neuron")), canvas, key, facts, note, behind("Masks", () => maskTable())), pairsCard),
    theta);

  let geometry = null;
  function draw() {
    if (!host.isConnected || !masked().length) return;
    const run = runOf();
    if (!run.masks.seeds.includes(view.seed)) view.seed = run.masks.seeds[0];
    const rounds = roundsOf();
    if (view.round === null || view.follow || !rounds.some((one) => one.round === view.round)) { view.round = rounds[rounds.length - 1].round; view.follow = true; }
    slider.max = rounds.length - 1;
    slider.value = rounds.findIndex((one) => one.round === view.round);
    shownRound.textContent = `${view.round} of ${rounds[rounds.length - 1].round}`;
    slider.setAttribute("aria-valuetext", `round ${view.round}`);
    const wanted = masked().map((one) => one.label).join() + "|" + run.label + "|" + run.masks.seeds.join();
    if (picks.dataset.made !== wanted) {
      picks.dataset.made = wanted;
      picks.replaceChildren(
        choice("run", masked().map((one) => [one.label, one.label]), run.label, (value) => { view.run = value; stop(); draw(); }),
        choice("seed", run.masks.seeds.map((seed) => [seed, seed]), view.seed, (value) => { view.seed = Number(value); stop(); draw(); }));
    }
    note.textContent = run.masks.note;
    drawMasks(run, now());
    drawPairs(run, now());
    drawTheta(run, now());
  }

  function drawMasks(run, one) {
    const size = neurons(), rows = one.owned ? bitsOf(one, size) : [], count = rows.length;
    const owners = one.owned ? Array.from({ length: size }, (_, j) => rows.reduce((sum, row) => sum + row[j], 0)) : Array.from(bytesOf(one.owners), (v) => v / 255);
    const most = one.owned ? Math.max(1, count) : 1, ratio = devicePixelRatio || 1, width = canvas.parentElement.clientWidth - 36, labels = Math.min(110, width * 0.24);
    const gap = 5, usable = width - labels - gap * (run.masks.layers.length - 1), cell = usable / size;
    const tall = count ? Math.max(3, Math.min(46, 340 / count)) : 0, head = 20, strip = 22, height = head + tall * count + (count ? 8 : 0) + strip + 4;
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio); canvas.style.height = height + "px"; canvas.style.width = width + "px";
    const context = canvas.getContext("2d"), color = tint(run);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.imageSmoothingEnabled = false;
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif"; context.textBaseline = "middle";
    const starts = [];
    run.masks.layers.forEach((layer, i) => { for (let j = 0; j < layer.size; j++) starts[layer.start + j] = labels + (layer.start + j) * cell + i * gap; });
    // whole pixels, so that no neuron is blurred into the next
    const edge = (x) => Math.round(x * ratio) / ratio;
    const paint = (j, y, h, fill, alpha) => { const x = edge(starts[j]); context.globalAlpha = alpha; context.fillStyle = fill; context.fillRect(x, edge(y), Math.max(1 / ratio, edge(starts[j] + cell) - x - (cell > 4 ? 1 / ratio : 0)), Math.max(1 / ratio, edge(y + h) - edge(y) - (h > 5 ? 1 / ratio : 0))); };
    rows.forEach((row, i) => {
      const y = head + i * tall;
      for (let j = 0; j < size; j++) paint(j, y, tall, row[j] ? color : css("--empty"), row[j] ? (owners[j] === 1 ? 1 : 0.45) : 1);
    });
    const below = head + tall * count + (count ? 8 : 0);
    for (let j = 0; j < size; j++) { paint(j, below, strip, css("--empty"), 1); if (owners[j]) paint(j, below + strip * (1 - owners[j] / most), strip * (owners[j] / most), css("--muted"), 1); }
    context.globalAlpha = 1; context.fillStyle = css("--muted");
    if (tall >= 11) rows.forEach((_, i) => context.fillText(fit(context, nameOf(one.clients[i]), labels - 8), 0, head + i * tall + tall / 2));
    else if (count) context.fillText(`${count} clients`, 0, head + 8);
    context.fillText("owners", 0, below + strip / 2);
    run.masks.layers.forEach((layer, i) => context.fillText(header(layer, i, cell * layer.size, (text) => context.measureText(text).width), starts[layer.start], 8));
    const covered = owners.filter((value) => value > 0).length, sole = one.owned ? owners.filter((value) => value === 1).length : null;
    facts.textContent = `${run.label}, seed ${one.seed}, round ${one.round}: somebody owns ${covered} of ${size} neurons (${number((100 * covered) / size, 1)} %)` + (sole === null ? "." : `; ${sole} have a single owner.`);
    canvas.setAttribute("aria-label", facts.textContent);
    const swatch = (label, alpha, fill) => { const mark = el("i"); mark.style.background = fill; mark.style.opacity = alpha; return el("li", {}, mark, label); };
    key.replaceChildren(...(count ? [swatch("its own alone", 1, color), swatch("shared with others", 0.45, color), swatch("not its own", 1, css("--empty"))] : []));
    geometry = { starts, cell, tall, head, rows, owners, size, one, run };
  }

  canvas.addEventListener("mousemove", (event) => {
    if (!geometry) return;
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const j = geometry.starts.findIndex((start) => x >= start && x < start + geometry.cell), i = Math.floor((y - geometry.head) / geometry.tall);
    if (j < 0) return hideTip();
    const layer = geometry.run.masks.layers.findLast((one) => one.start <= j), count = geometry.owners[j];
    const owner = i >= 0 && i < geometry.rows.length ? `${nameOf(geometry.one.clients[i])}: ${geometry.rows[i][j] ? "owns it" : "does not own it"}` : "";
    const many = geometry.one.owned ? `${count} owner${count === 1 ? "" : "s"}` : `${number(100 * count, 0)} % of the cohort own it`;
    showTip(event.clientX, event.clientY, el("b", {}, `layer ${geometry.run.masks.layers.indexOf(layer) + 1} (${layer.name}), neuron ${j - layer.start}`), el("div", {}, owner), el("div", {}, many));
  });
  canvas.addEventListener("mouseleave", hideTip);
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") { slider.value = Number(slider.value) + (event.key === "ArrowRight" ? 1 : -1); slider.dispatchEvent(new Event("input")); say(facts.textContent); event.preventDefault(); }
  });

  function overlaps(one) {
    const rows = bitsOf(one, neurons());
    return rows.map((a) => rows.map((b) => { let both = 0, either = 0; for (let j = 0; j < a.length; j++) { both += a[j] & b[j]; either += a[j] | b[j]; } return either ? both / either : 0; }));
  }

  function drawPairs(run, one) {
    pairsCard.hidden = !one.owned || one.clients.length < 2;
    if (pairsCard.hidden) return;
    const values = overlaps(one), count = values.length, ratio = devicePixelRatio || 1, width = Math.min(340, pairs.parentElement.clientWidth - 36);
    const named = count <= 12, label = named ? Math.min(90, width * 0.3) : 0, cell = (width - label) / count, height = width - label + (named ? 20 : 0);
    pairs.width = Math.round(width * ratio); pairs.height = Math.round(height * ratio); pairs.style.height = height + "px"; pairs.style.width = width + "px";
    const context = pairs.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif"; context.textBaseline = "middle";
    values.forEach((row, i) => row.forEach((value, k) => {
      context.globalAlpha = 1; context.fillStyle = css("--empty"); context.fillRect(label + k * cell, i * cell, cell - (cell > 5), cell - (cell > 5));
      context.globalAlpha = value; context.fillStyle = tint(run); context.fillRect(label + k * cell, i * cell, cell - (cell > 5), cell - (cell > 5));
      context.globalAlpha = 1;
      if (cell > 30) { context.fillStyle = value > 0.55 ? css("--card") : css("--ink"); context.textAlign = "center"; context.fillText(number(value, 2), label + (k + 0.5) * cell, (i + 0.5) * cell); context.textAlign = "left"; }
    }));
    context.fillStyle = css("--muted");
    if (named) one.clients.forEach((client, i) => { context.fillText(fit(context, nameOf(client), label - 8), 0, (i + 0.5) * cell); context.fillText(fit(context, nameOf(client), cell - 4), label + i * cell + 2, count * cell + 10); });
    const apart = values.flatMap((row, i) => row.slice(i + 1)), mean = apart.reduce((a, b) => a + b, 0) / apart.length;
    pairs.setAttribute("aria-label", `Overlap between every two of ${count} clients; mean ${number(mean, 3)}`);
    pairs.onmousemove = (event) => {
      const box = pairs.getBoundingClientRect(), k = Math.floor((event.clientX - box.left - label) / cell), i = Math.floor((event.clientY - box.top) / cell);
      if (i >= 0 && k >= 0 && i < count && k < count) showTip(event.clientX, event.clientY, el("b", {}, `${nameOf(one.clients[i])} and ${nameOf(one.clients[k])}`), el("div", {}, number(values[i][k], 3)));
      else hideTip();
    };
    pairs.onmouseleave = hideTip;
  }

  function drawTheta(run, one) {
    theta.hidden = !one.theta;
    if (!one.theta) return theta.replaceChildren();
    const total = one.theta.flat().reduce((a, b) => a + b, 0), sure = one.theta.reduce((sum, row) => sum + row.filter((_, b) => b < 3 || b >= BINS - 3).reduce((a, b) => a + b, 0), 0);
    const card = el("figure", { class: "card wide" }, el("header", {}, el("h3", {}, "Preferences θ, layer by layer")));
    const grid = el("div", { class: "scroll" }), width = Math.max(240, Math.min(theta.clientWidth || 600, 1400) - 40), columns = Math.max(1, Math.min(one.theta.length, Math.floor(width / 170)));
    const each = Math.floor(width / columns) - 12, rows = Math.ceil(one.theta.length / columns), made = svg("svg", { width, height: rows * 128, role: "img", "aria-label": `Histogram of θ in round ${one.round}` });
    one.theta.forEach((row, l) => {
      const x = (l % columns) * (each + 12), y = Math.floor(l / columns) * 128, most = Math.max(1, ...row);
      made.append(svg("text", { x, y: y + 12, class: "soft" }, header(run.masks.layers[l], l, each, (text) => 7 * text.length)));
      row.forEach((value, b) => made.append(svg("rect", { x: x + (b * each) / BINS, y: y + 100 - (80 * value) / most, width: Math.max(1, each / BINS - 1), height: (80 * value) / most, fill: tint(run) })));
      made.append(svg("line", { x1: x, x2: x + each, y1: y + 100.5, y2: y + 100.5, class: "axis" }), svg("text", { x, y: y + 116, class: "soft" }, "0"), svg("text", { x: x + each, y: y + 116, "text-anchor": "end", class: "soft" }, "1"));
    });
    grid.append(made);
    card.append(grid, el("figcaption", { class: "say" }, `θ is the probability with which a client draws a neuron, over all clients of round ${one.round}. It starts at random, around ½ by default; ${number((100 * sure) / total, 0)} % lie within 0.1 of 0 or 1.`),
      behind("θ", () => table(["θ from", ...run.masks.layers.map((layer) => layer.name)], Array.from({ length: BINS }, (_, b) => [number(b / BINS, 3), ...one.theta.map((row) => String(row[b]))]), "Histogram of θ")));
    theta.replaceChildren(card);
  }

  const overlapTable = () => { const one = now(); return table(["", ...one.clients.map(nameOf)], overlaps(one).map((row, i) => [nameOf(one.clients[i]), ...row.map((value) => number(value, 3))]), "Overlap of every two clients"); };
  function maskTable() {
    const one = now(), run = runOf();
    if (!one.owned) return el("p", {}, "Single clients' masks are not kept.");
    return table(["client", ...run.masks.layers.map((layer) => `${layer.name} (${layer.size})`)], bitsOf(one, neurons()).map((row, i) => [nameOf(one.clients[i]), ...run.masks.layers.map((layer) => String(row.slice(layer.start, layer.start + layer.size).reduce((a, b) => a + b, 0)))]), "Neurons each client owns, by layer");
  }
  redraw.add(draw);
  let known = 0;
  new ResizeObserver(() => { if (Math.abs(host.clientWidth - known) > 2) { known = host.clientWidth; draw(); } }).observe(host);
}

// A layer's header, never cut: its number and name, or only its number, as there is room.
function header(layer, i, room, widthOf) {
  const ways = [...(layer ? [`layer ${i + 1} (${layer.name})`] : []), `layer ${i + 1}`, String(i + 1)];
  return ways.find((text) => widthOf(text) <= room) || "";
}

function fit(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let length = text.length;
  while (length > 1 && context.measureText(text.slice(0, length) + "…").width > room) length--;
  return length > 1 ? text.slice(0, length) + "…" : "";
}
