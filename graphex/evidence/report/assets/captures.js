// How the graph runs: device graphs by key, what is copied, what runs outside of them and why.

function captures(app) {
  const { model } = app.current();
  const { graph } = model;
  return el(
    "div",
    {},
    section("Running", null, countTable(graph)),
    section("Device graphs", "One for each combination of sizes.", captureTable(graph)),
    graph.cuts.length
      ? section("Outside of device graphs", "Ops that a device graph cannot hold.", cutTable(app, graph))
      : null,
    graph.fallbacks.length ? section("Plainer than asked for", null, fallbackTable(graph)) : null,
    graph.verifications.length ? section("Verification", null, verdictTable(graph)) : null,
    ...regionSections(app, graph),
    ...furtherRecords(graph, (kind) => !ABOUT_STREAMS.test(kind) && !ABOUT_REGIONS.includes(kind)),
  );
}

const ABOUT_REGIONS = ["region", "region border"];

function regionSections(app, graph) {
  const [regions, borders] = ABOUT_REGIONS.map((kind) => graph.more.filter((record) => record.kind === kind));
  const kept = regions.length ? section("Compiled regions", "What Inductor compiled.", regionTable(app, regions)) : null;
  if (!borders.length) return [kept];
  return [kept, section("Outside of compiled regions", null, borderTable(app, borders))];
}

function regionTable(app, regions) {
  const call = (each) => {
    if (!each.seconds_single) return "not measured";
    return `${timeText(each.seconds_compiled)} instead of ${timeText(each.seconds_single)}`;
  };
  const names = (each) => each.kernels.map((name) => el("p", { class: "mono" }, name));
  const rows = regions.map((each) => [
    each.region ? chip(each.region, () => app.showFinal(each.region), "node-chip") : "not used",
    each.status,
    String(each.calls),
    el("details", {}, el("summary", {}, String(each.kernels.length)), names(each)),
    timeText(each.seconds),
    call(each),
    el("span", { class: "mono" }, each.lines[0] || ""),
  ]);
  return table(["region", "status", "ops", "kernels", "compiling", "a call", "first line"], rows, { right: [2, 4] });
}

function borderTable(app, borders) {
  const rows = borders.map((each) => [
    chip(each.op, () => app.showFinal(each.node), "node-chip"),
    String(each.count),
    each.reason,
    el("span", { class: "mono" }, each.line),
  ]);
  return table(["first op", "ops", "because", "line"], rows, { right: [1] });
}

// Records of kinds that have no view of their own, as they are: nothing in the journal is hidden.
function furtherRecords(graph, wanted) {
  const kinds = [...new Set(graph.more.map((record) => record.kind))].filter(wanted);
  const shown = (value) => {
    if (typeof value === "number") return String(Number(value.toPrecision(6)));
    if (Array.isArray(value)) return value.map(shown).join(", ");
    return typeof value === "string" ? value : JSON.stringify(value);
  };
  return kinds.map((kind) => {
    const records = graph.more.filter((record) => record.kind === kind);
    const fields = Object.keys(records[0]).filter((field) => field !== "kind" && field !== "graph");
    const rows = records.map((record) => fields.map((field) => cut(shown(record[field]), 600)));
    return section(
      kind[0].toUpperCase() + kind.slice(1),
      null,
      table(
        fields.map((field) => field.replaceAll("_", " ")),
        rows,
      ),
    );
  });
}

function countTable(graph) {
  const ran = Object.entries(graph.counts).filter(([, counts]) => Object.values(counts).some(Boolean)); // not: cut to pieces
  const rows = ran.map(([name, counts]) => {
    const captured = (counts.captured || 0) + (counts.recaptured || 0);
    const calls = (counts.calls || 0) - captured + (counts.replays || 0);
    return [
      name,
      ...[calls, counts.captured || 0, counts.recaptured || 0, counts.replays || 0, counts.evicted || 0].map(String),
    ];
  });
  if (!rows.length && graph.instead) return empty(`The graph does not run: '${graph.instead}' runs instead.`);
  if (!rows.length) return empty("The graph has not run yet.");
  return table(["graph", "calls", "captured", "captured again", "replayed", "evicted"], rows, {
    right: [1, 2, 3, 4, 5],
  });
}

function captureTable(graph) {
  if (!graph.captures.length) return empty("None: the graph runs as straight-line code.");
  const rows = graph.captures.map((each) => [
    el("span", { class: "mono" }, each.key || "fixed sizes"),
    each.status,
    timeText(each.seconds),
    sizeText(each.reserved_bytes),
    String(each.inputs_by_address),
    String(each.inputs_copied),
    each.reason,
  ]);
  return table(["key", "status", "time", "memory", "inputs read in place", "inputs copied", "why again"], rows, {
    right: [2, 3, 4, 5],
  });
}

function cutTable(app, graph) {
  const rows = graph.cuts.map((each) => [
    chip(each.node, () => app.showFinal(each.node), "node-chip"),
    el("span", { class: "mono" }, each.op),
    String(each.ops),
    each.reason,
    el("span", { class: "mono" }, each.line),
  ]);
  return table(["node", "op", "ops", "because", "line"], rows, { right: [2] });
}

function fallbackTable(graph) {
  return table(
    ["what", "because", "line"],
    graph.fallbacks.map((each) => [each.what, each.reason, el("span", { class: "mono" }, each.line)]),
  );
}

function verdictTable(graph) {
  const rows = graph.verifications.map((each) => [
    each.status,
    each.reference,
    typeof each.worst_error === "number" ? each.worst_error.toPrecision(3) : each.worst_error,
    each.blamed ?? each.pass_name,
    each.reason,
  ]);
  return table(["verdict", "measured against", "worst error", "to blame", "reason"], rows, { right: [2] });
}
