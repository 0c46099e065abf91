// What is written in place and why that is right; what is still copied and why; the memory over a training step.

function memory(app) {
  const { model } = app.current();
  const { graph } = model;
  const certified = graph.rewrites.filter((record) => record.certificate);
  const saved = certified.reduce((sum, record) => sum + record.certificate.bytes_saved, 0);
  const moved = graph.refusals.reduce((sum, record) => sum + record.bytes_moved, 0);
  const [peak] = graph.memory;
  const peaks = peak ? [...new Set([peak.peak_before, peak.peak_after].map(sizeText))] : [];
  const cards = [
    peak ? ["peak of intermediates", peaks.join(" → ")] : null,
    ["saved in every call", sizeText(saved)],
    ["still copied in every call", sizeText(moved)],
  ].filter(Boolean);
  return el(
    "div",
    {},
    el(
      "dl",
      { class: "cards" },
      cards.map(([title, value]) => el("div", {}, el("dt", {}, title), el("dd", {}, value))),
    ),
    section(
      "Still copied",
      "What each call moves because a write in place could not be proven right.",
      refusedTable(app, graph, certified),
    ),
    section(
      "Certificates",
      "Why each write in place is right: the owner of the memory, and its last reader.",
      certificateTable(app, certified),
    ),
  );
}

function refusedTable(app, graph, certified) {
  const costly = graph.refusals.filter((record) => record.bytes_moved).sort((a, b) => b.bytes_moved - a.bytes_moved);
  if (!costly.length) return empty(certified.length ? "Nothing: every update is written in place." : "Nothing.");
  const rows = costly.map((record) => [
    chip(record.node, () => app.showRecord(record), "node-chip"),
    record.rule,
    record.reason,
    sizeText(record.bytes_moved),
    el("span", { class: "mono" }, record.line),
  ]);
  return table(["node", "rule", "because", "bytes", "line"], rows, { right: [3] });
}

function certificateTable(app, certified) {
  if (!certified.length) return empty("No write in place was made in this graph.");
  const rows = certified.map((record) => [
    chip(record.into.join(", "), () => app.showRecord(record), "node-chip"),
    el("div", {}, record.rule, el("p", { class: "note" }, record.because)),
    el(
      "span",
      { class: "mono" },
      record.certificate.storage
        .split(", ")
        .map((name) => namedInput(app, name))
        .join(", "),
    ),
    el("span", { class: "mono" }, record.certificate.last_read),
    sizeText(record.certificate.bytes_saved),
    el("span", { class: "mono" }, record.line),
  ]);
  return table(["node", "rule", "memory of", "last read by", "saved", "line"], rows, { right: [4] });
}

// Forward, backward and optimizer one after the other: a curve of the memory over all of them, and a table.
function trainingStep(app, parts) {
  const rows = parts.map((part) => [
    part.phase,
    partName(app, part),
    part.nodes ? String(part.nodes) : "",
    sizeText(part.most),
    part.phase === "whole step" ? "" : sizeText(part.held),
    part.remark,
  ]);
  const head = ["part", "graph", "nodes", "memory at most", "held after", "remark"];
  return el(
    "div",
    { class: "training-step" },
    section(
      "Training step",
      "Memory besides parameters, as the shapes predict it. A forward holds what it saves until its backward has run.",
      memoryCurve(parts.filter((part) => part.phase !== "whole step")),
      table(head, rows, { right: [2, 3, 4] }),
    ),
  );
}

function partName(app, part) {
  const number = data.graphs.findIndex((graph) => graph.name === part.graph);
  return number < 0 ? part.graph : chip(part.graph, () => app.chooseGraph(number), "");
}

const [CURVE_WIDTH, CURVE_HEIGHT, CURVE_LEAST] = [1000, 150, 60]; // the least is the width of a part without ops

function memoryCurve(parts) {
  const most = Math.max(...parts.map((part) => Math.max(part.most, part.held, ...part.curve)), 1);
  const nodes = parts.reduce((sum, part) => sum + part.nodes, 0) || 1;
  const scale = (CURVE_WIDTH - CURVE_LEAST * parts.length) / nodes;
  const top = (bytes) => CURVE_HEIGHT - (CURVE_HEIGHT - 24) * (bytes / most);
  const root = svg("svg", { viewBox: `0 0 ${CURVE_WIDTH} ${CURVE_HEIGHT}`, role: "img", class: "memory-curve" });
  const label = svg("title", {});
  label.textContent = `memory over the step, at most ${sizeText(most)}`;
  root.append(label);
  let left = 0;
  for (const part of parts) {
    const width = CURVE_LEAST + part.nodes * scale;
    const points = part.curve.length ? part.curve : [part.before, Math.max(part.most, part.held)];
    const pitch = width / points.length;
    const steps = points.map((bytes, place) => `H${left + place * pitch} V${top(bytes)}`);
    const outline = `M${left},${CURVE_HEIGHT} ${steps.join(" ")} H${left + width} V${CURVE_HEIGHT} z`;
    const held = svg("rect", {
      x: left,
      y: top(Math.min(part.before, part.held)),
      width,
      height: CURVE_HEIGHT - top(Math.min(part.before, part.held)),
      class: "held",
    });
    const name = svg("text", { x: left + 6, y: 14 });
    name.textContent = `${part.phase} ${sizeText(part.most || part.held)}`;
    root.append(svg("path", { d: outline, class: part.phase }), held, name);
    left += width;
  }
  return root;
}
