// What is written in place and why that is right; what is still copied and why.

function memory(app) {
  const { model } = app.current();
  const { graph } = model;
  const certified = graph.rewrites.filter((record) => record.certificate);
  const saved = certified.reduce((sum, record) => sum + record.certificate.bytes_saved, 0);
  const moved = graph.refusals.reduce((sum, record) => sum + record.bytes_moved, 0);
  const [peak] = graph.memory;
  const cards = [
    peak ? ["peak of intermediates", `${sizeText(peak.peak_before)} → ${sizeText(peak.peak_after)}`] : null,
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
      refusedTable(app, graph),
    ),
    section(
      "Certificates",
      "Why each write in place is right: whose memory it is, and who read it last.",
      certificateTable(app, certified),
    ),
  );
}

function refusedTable(app, graph) {
  const costly = graph.refusals.filter((record) => record.bytes_moved).sort((a, b) => b.bytes_moved - a.bytes_moved);
  if (!costly.length) return empty("Nothing: every update that was found is written in place.");
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
