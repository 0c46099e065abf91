// The first view: what happened, in sentences that lead on; what could be done about it; every pass with its time; how
// the report was made.

function overview(app) {
  return el(
    "div",
    {},
    summary(data.summary, app),
    graphTable(app),
    (data.training || []).map((parts) => trainingStep(app, parts)),
    advice(app),
    timeline(app),
    compileTime(),
    madeWith(app),
  );
}

function summary(sentences, app) {
  const items = sentences.map((sentence) => el("li", { class: `tone-${sentence.tone}` }, linked(sentence, app)));
  return el("section", { class: "summary" }, el("h2", { class: "hidden" }, "Summary"), el("ul", {}, items));
}

// The text of a sentence, with a link for each part of it that leads somewhere.
function linked({ text, links }, app) {
  if (!app || !links) return text;
  const parts = [];
  let done = 0;
  for (const link of links) {
    const [start, end] = link.at;
    const follow = (event) => {
      event.preventDefault();
      app.follow(link);
    };
    parts.push(text.slice(done, start), el("a", { href: "#", class: "link", onclick: follow }, text.slice(start, end)));
    done = end;
  }
  return [...parts, text.slice(done)];
}

// Where the first call went before it computed anything.
function compileTime() {
  const stages = data.compile_time || [];
  if (!stages.length) return null;
  const total = stages.reduce((sum, each) => sum + each.seconds, 0);
  const rows = stages.map(({ stage, seconds }) => [
    stage,
    STAGES[stage] || "",
    el(
      "span",
      { class: "track" },
      el("span", { class: "bar seconds", style: { width: `${(100 * seconds) / total}%` } }),
    ),
    timeText(seconds),
  ]);
  const note = `${timeText(total)} of compiling, all graphs together.`;
  return el(
    "div",
    { id: "compile-time" },
    section("Compile time", note, table(["stage", "what it does", "", "time"], rows, { right: [3] })),
  );
}

const STAGES = {
  Dynamo: "torch reads the Python program, and makes guards",
  AOTAutograd: "torch traces ATen ops, and the backward",
  passes: "graphex rewrites the graph",
  regions: "Inductor compiles what no rule fused, and both ways are measured",
  program: "graphex writes the program that runs",
  kernels: "Triton compiles kernels",
  capture: "the device records the graphs that are replayed",
  "other versions": "graphex rewrites the graph again, without what verification found wrong or on two streams",
};

function madeWith(app) {
  const options = Object.entries(data.options || {});
  const own = options.length
    ? table(
        ["option", "value"],
        options.map(([name, value]) => [el("span", { class: "mono" }, name), el("span", { class: "mono" }, value)]),
      )
    : empty("Every option is as it is by default.");
  const code = app.current().model.graph.code || [];
  return el(
    "div",
    { id: "made-with" },
    section("Options", "Those that are not as they are by default.", own),
    section("Made with", null, table(["", ""], Object.entries(data.made_with))),
    code.length
      ? el(
          "p",
          {},
          chip("Generated code", () => app.open("code"), ""),
        )
      : null,
  );
}

function graphTable(app) {
  if (data.graphs.length < 2) return null;
  const rows = data.graphs.map((graph, number) => [
    chip(graph.name, () => app.chooseGraph(number), app.state.graph === number ? "chosen" : ""),
    el("span", { class: "because" }, linked(graph.because || { text: graph.reason || "" }, app)),
    el("span", { class: "whole" }, nodeCount(graph)),
    el("span", { class: "whole" }, opCount(graph)),
    graph.memory.map(peakText),
    String(graph.rewrites.length),
    String(graph.refusals.filter((each) => !each.nothing_lost).length + graph.near_misses.length),
  ]);
  const head = ["graph", "why it exists", "nodes", "device ops", "peak memory", "rewrites", "refused or missed"];
  const devices = [...new Set(data.graphs.flatMap((graph) => graph.devices))].join(", ");
  return el(
    "div",
    { id: "graphs" },
    section(
      "Graphs",
      `On ${devices}. Everything below and on the other pages is about the chosen one.`,
      table(head, rows, { right: [5, 6] }),
    ),
  );
}

function peakText({ peak_before: before, peak_after: after }) {
  const text = before === after ? sizeText(before) : `${sizeText(before)} → ${sizeText(after)}`;
  return el("span", { class: "whole" }, text);
}

function opCount(graph) {
  if (!graph.pictures.length) return "";
  const count = (picture, field) =>
    picture.reduce((sum, place) => sum + (graph.nodes[place][field] ?? graph.nodes[place].computes), 0);
  return `${count(graph.pictures[0], "given")} → ${count(graph.pictures[graph.runs], "computes")}`;
}

function nodeCount(graph) {
  const { passes } = graph;
  if (!passes.length) return graph.pictures.length ? String(graph.pictures[0].length) : "";
  return `${passes[0].nodes_before} → ${passes[passes.length - 1].nodes_after}`;
}

// Refusals that cost bytes and near misses that come with an edit: what a person can do something about.
function advice(app) {
  const { model } = app.current();
  const { near_misses: misses, refusals } = model.graph;
  const costly = refusals.filter((each) => each.bytes_moved).sort((a, b) => b.bytes_moved - a.bytes_moved);
  const helped = misses.filter((each) => each.edit).sort((a, b) => b.matched / b.ops - a.matched / a.ops);
  const items = [
    ...costly.map((each) => [
      each,
      `${each.rule} was refused: ${each.reason}. ${sizeText(each.bytes_moved)} are copied in every call.`,
    ]),
    ...helped.map((each) => [each, `${each.rule} nearly matched: ${each.reason}. What would help: ${each.edit}.`]),
  ].slice(0, 8);
  if (!items.length) return null;
  const list = items.map(([record, text]) =>
    el(
      "li",
      {},
      el("p", {}, text),
      el("p", { class: "note mono" }, record.line),
      chip(`Show ${record.node}`, () => app.showRecord(record), ""),
    ),
  );
  return section("Worth a look", null, el("ul", { class: "advice" }, list));
}

function timeline(app) {
  const { model } = app.current();
  const { passes } = model.graph;
  if (!passes.length) return section("Passes", null, empty("No pass ran on this graph."));
  const longest = Math.max(...passes.map((ran) => ran.seconds), 1e-9);
  const most = Math.max(...passes.map((ran) => Math.max(ran.nodes_before, ran.nodes_after)), 1);
  const rows = passes.map((ran, number) => passRow(app, ran, number, longest, most));
  const head = ["stage", "pass", "time", "nodes", "what changed"].map((text) => el("span", {}, text));
  const total = passes.reduce((sum, ran) => sum + ran.seconds, 0);
  return section(
    "Passes",
    `${passes.length} passes, ${timeText(total)} in all. Choose one to see the graph before and after it.`,
    el("div", { class: "timeline" }, el("div", { class: "timeline-head", "aria-hidden": "true" }, head), rows),
  );
}

function passRow(app, ran, number, longest, most) {
  const changes = [
    ...Object.entries(ran.removed).map(([op, count]) => `−${count} ${opTitle(op)}`),
    ...Object.entries(ran.added).map(([op, count]) => `+${count} ${opTitle(op)}`),
  ];
  const shown = changes.slice(0, 5).join("  ") + (changes.length > 5 ? `  and ${changes.length - 5} more` : "");
  const delta = ran.nodes_after - ran.nodes_before;
  const bar = (share, kind) => el("span", { class: `bar ${kind}`, style: { width: `${Math.max(share * 100, 0.6)}%` } });
  return el(
    "button",
    {
      type: "button",
      class: `pass ${ran.status.replace(" ", "-")}`,
      "data-pass": number,
      onclick: () => app.showPass(number),
    },
    el("span", { class: "stage" }, ran.stage),
    el(
      "span",
      { class: "name" },
      ran.name,
      ran.status === "changed" || ran.status === "unchanged" ? null : el("em", {}, ran.status),
    ),
    el(
      "span",
      { class: "time" },
      el("span", { class: "track" }, bar(ran.seconds / longest, "seconds")),
      el("span", { class: "number" }, timeText(ran.seconds)),
    ),
    el(
      "span",
      { class: "count" },
      el("span", { class: "track" }, bar(ran.nodes_after / most, "nodes")),
      el(
        "span",
        { class: "number" },
        String(ran.nodes_after),
        delta ? el("b", { class: delta < 0 ? "less" : "more" }, ` ${delta > 0 ? "+" : "−"}${Math.abs(delta)}`) : null,
      ),
    ),
    el("span", { class: "what" }, shown || ran.reason),
  );
}
