// The user's source, with marks on the lines that something happened to.

const MARKS = { ...EFFECTS, break: "the graph breaks here" };

function lineText(file, number) {
  for (const block of (data.files[file] || { blocks: [] }).blocks) {
    const text = block.lines[number - block.first];
    if (text !== undefined) return text;
  }
  return "";
}

// What happened on each line of a file: marks by line, from the nodes that came from there.
function lineMarks(model, file) {
  return model.memo(`marks ${file}`, () => {
    const marks = new Map();
    const add = (line, effect, name) => {
      if (!marks.has(line)) marks.set(line, new Map());
      const here = marks.get(line);
      if (!here.has(effect)) here.set(effect, new Set());
      here.get(effect).add(name);
    };
    const given = model.records(model.steps[0]);
    const final = model.records(model.steps[model.steps.length - 1]);
    const last = model.graph.runs;
    for (const [picture, records] of [
      [0, given],
      [last, final],
    ]) {
      for (const node of model.nodes(picture)) {
        const place = model.lineOf(node);
        if (!place || place[0] !== file) continue;
        add(place[1], "", node.name);
        for (const { effect } of records.get(node.name) || []) if (effect) add(place[1], effect, node.name);
      }
    }
    const missing = [...model.graph.refusals, ...model.graph.near_misses];
    for (const record of missing.filter((each) => !each.nothing_lost)) {
      const [, name, line] = /^(.*?):(\d+)/.exec(record.line) || [];
      if (name === data.files[file].name) add(Number(line), "missed", record.node);
    }
    for (const line of breaksByLine(file).keys()) add(line, "break", null);
    return marks;
  });
}

// The graph breaks of all graphs, by their line in a file: a break belongs to the graphs before and after it.
function breaksByLine(file) {
  const found = new Map();
  for (const record of [...data.graphs.flatMap((graph) => graph.breaks), ...(data.breaks || [])]) {
    const [, name, line] = /^(.*?):(\d+)/.exec(record.line) || [];
    if (name === data.files[file].name) found.set(Number(line), record);
  }
  return found;
}

// How much happened in a file: the lines of it that have a mark.
function markedLines(model, file) {
  return [...lineMarks(model, file).values()].filter((here) => [...here.keys()].some(Boolean)).length;
}

function source(app) {
  const { model } = app.current();
  if (!data.files.length) return section("Source", null, empty("No source lines were recorded for this model."));
  const counts = data.files.map((_, number) => markedLines(model, number));
  const order = data.files.map((_, number) => number).sort((a, b) => counts[b] - counts[a]);
  if (app.state.file === null) app.state.file = order[0]; // where most happened
  const which = app.state.file;
  const file = data.files[which];
  const label = (number) => `${data.files[number].name} (${plural(counts[number], "marked line")})`;
  const picker = el(
    "select",
    { "aria-label": "Source file", onchange: (event) => app.showSource(Number(event.target.value), 0) },
    order.map((number) => el("option", { value: number, selected: number === which }, label(number))),
  );
  const side = el(
    "aside",
    { class: "line-panel", "aria-live": "polite" },
    lineDetails(app, model, which, app.state.line),
  );
  const blocks = file.blocks.length
    ? file.blocks.map((block) => sourceBlock(app, model, which, block))
    : empty("The file cannot be read any more.");
  const head = el("div", { class: "toolbar" }, picker, el("span", { class: "note mono path" }, file.path));
  return el(
    "section",
    { class: "source-page" },
    head,
    el("div", { class: "source-columns" }, el("div", { class: "source-code" }, blocks), side),
  );
}

function sourceBlock(app, model, file, block) {
  const marks = lineMarks(model, file);
  const lines = block.lines.map((text, index) => {
    const number = block.first + index;
    const here = marks.get(number);
    const effects = here ? [...here.keys()].filter(Boolean) : [];
    return el(
      here ? "button" : "div",
      {
        type: here ? "button" : null,
        class: `line ${here ? "marked" : ""} ${effects.includes("break") ? "broken" : ""} ${number === app.state.line ? "chosen" : ""}`,
        "data-line": number,
        onclick: here ? () => app.showSource(file, number) : null,
      },
      el("span", { class: "line-number" }, String(number)),
      el(
        "span",
        { class: "line-marks" },
        effects.map((effect) => el("i", { class: `dot e-${effect.replace(" ", "-")}`, title: MARKS[effect] })),
      ),
      el("span", { class: "line-text" }, text || " "),
    );
  });
  return el("div", { class: "code-block" }, lines);
}

function lineDetails(app, model, file, line) {
  const here = lineMarks(model, file).get(line);
  if (!here) return sourceLegend(model, file);
  const missing = [...model.graph.refusals, ...model.graph.near_misses].filter((record) =>
    record.line.startsWith(`${data.files[file].name}:${line}`),
  );
  const broken = breaksByLine(file).get(line);
  const rows = [...here]
    .filter(([effect]) => effect && effect !== "break")
    .map(([effect, names]) =>
      el(
        "div",
        { class: `event e-${effect.replace(" ", "-")}` },
        el("strong", {}, EFFECTS[effect]),
        el("p", {}, chips(app, model, names)),
      ),
    );
  const misses = missing.map((record) =>
    el(
      "div",
      { class: "miss" },
      el("strong", {}, record.rule),
      el("p", {}, `${record.reason}.`),
      record.edit ? el("p", { class: "edit" }, `What would help: ${record.edit}.`) : null,
    ),
  );
  const all = [...(here.get("") || [])];
  return el(
    "div",
    {},
    el("h3", {}, `Line ${line}`),
    broken ? breakDetails(broken) : null,
    ...misses,
    ...rows,
    all.length ? el("h4", {}, plural(all.length, "node")) : null,
    el("p", {}, chips(app, model, all.slice(0, 40))),
  );
}

function sourceLegend(model, file) {
  const used = new Set([...lineMarks(model, file).values()].flatMap((marks) => [...marks.keys()]));
  const shown = Object.entries(MARKS).filter(([effect]) => used.has(effect));
  return el(
    "div",
    {},
    empty("Choose a marked line to see what became of it."),
    shown.length ? legend(Object.fromEntries(shown)) : null,
  );
}

function breakDetails(record) {
  return el(
    "div",
    { class: "event e-break" },
    el("strong", {}, `The graph breaks here: ${record.cause}`),
    el("p", {}, `${record.reason}.`),
    record.edit ? el("p", { class: "edit" }, `What would help: ${record.edit}`) : null,
  );
}

function chips(app, model, names) {
  const final = model.byName(model.graph.runs);
  return [...names].map((name) =>
    chip(name, () => (final.has(name) ? app.showFinal(name) : app.showOrigin(name)), "node-chip"),
  );
}

function codeLines(app, file, first, last, chosen) {
  const rows = [];
  for (let number = Math.max(1, first); number <= last; number += 1) {
    const text = lineText(file, number);
    rows.push(
      el(
        "div",
        { class: `line ${number === chosen ? "chosen" : ""}` },
        el("span", { class: "line-number" }, String(number)),
        el("span", { class: "line-text" }, text || " "),
      ),
    );
  }
  return el("div", { class: "code-block small" }, rows);
}
