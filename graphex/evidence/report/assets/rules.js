// Every rule: where it applied, where it nearly did, why it ended there, and the edit that would help.

function rules(app) {
  const { model } = app.current();
  const all = gatherRules(model.graph);
  if (!all.length) return section("Rules", null, empty("No rule found anything to do in this graph."));
  const note = "A candidate is a place where a rule applied, was refused, or matched most of its ops.";
  return section(
    "Rules",
    note,
    el(
      "div",
      { class: "rules" },
      all.map((rule) => ruleBlock(app, rule)),
    ),
  );
}

function gatherRules(graph) {
  const found = new Map();
  const at = (name) => {
    if (!found.has(name))
      found.set(name, {
        name,
        made: [],
        refused: [],
        missed: [],
        asGood: [],
        matches: null,
        candidates: null,
        remarks: [],
      });
    return found.get(name);
  };
  for (const record of graph.rules) {
    const rule = at(record.rule || "all rules");
    rule.matches = (rule.matches || 0) + record.matches;
    rule.candidates = (rule.candidates || 0) + record.candidates;
    if (record.remark) rule.remarks.push(record.remark);
  }
  for (const record of graph.rewrites) at(record.rule).made.push(record);
  for (const record of graph.refusals) at(record.rule)[record.nothing_lost ? "asGood" : "refused"].push(record);
  for (const record of graph.near_misses) at(record.rule).missed.push(record);
  // First what worked here and not there: the difference between two places is the best hint.
  const missing = (rule) => rule.missed.length + rule.refused.length;
  const rank = (rule) => (missing(rule) ? (rule.made.length ? 2 : 1) : 0);
  return [...found.values()].sort((a, b) => rank(b) - rank(a) || missing(b) - missing(a));
}

function ruleBlock(app, rule) {
  const missing = rule.missed.length + rule.refused.length;
  const made = rule.matches === null ? rule.made.length : rule.matches;
  const total = rule.candidates === null ? made + missing : rule.candidates;
  const groups = alike([...rule.refused, ...rule.missed]);
  const share = total ? made / total : 0;
  const head = el(
    "summary",
    {},
    el("span", { class: "mono name" }, rule.name),
    el("span", { class: "track wide" }, el("span", { class: "bar nodes", style: { width: `${share * 100}%` } })),
    el("span", { class: "number" }, total || !rule.asGood.length ? `${made} of ${total}` : "nothing to gain"),
    missing ? el("span", { class: "badge missed" }, plural(missing, "miss").replace("misss", "misses")) : null,
  );
  const body = [
    ...rule.remarks.map((remark) => el("p", { class: "note" }, remark)),
    missing ? el("h4", {}, "Refused or nearly matched") : null,
    ...groups.map((records) => missBlock(app, records)),
    rule.asGood.length ? el("h4", {}, "As good as it is") : null,
    ...asGoodBlocks(app, rule.asGood),
    rule.made.length ? el("h4", {}, "Applied") : null,
    rule.made.length ? madeTable(app, rule.made) : null,
  ];
  return el(
    "details",
    { class: "rule", "data-rule": rule.name, open: missing > 0 && groups.length <= 6 },
    head,
    el("div", { class: "rule-body" }, body),
  );
}

// Records with the same reason at the same line, together: the layers of a model run the same code.
function alike(records) {
  const groups = new Map();
  for (const record of records) {
    const key = JSON.stringify([withoutNumbers(record.reason), record.edit, record.line]);
    groups.set(key, [...(groups.get(key) || []), record]);
  }
  return [...groups.values()];
}

// 'add_7' and 'add_12' are the same place of two layers.
function withoutNumbers(text) {
  return text.replace(/_\d+/g, "");
}

function missBlock(app, records) {
  const [record] = records;
  const matched = record.ops ? `${record.matched} of ${record.ops} ops matched` : "refused";
  const moved = records.reduce((sum, each) => sum + (each.bytes_moved || 0), 0);
  return el(
    "div",
    { class: "miss" },
    el("p", {}, el("strong", {}, matched), `: ${record.reason}.`),
    record.edit ? el("p", { class: "edit" }, `What would help: ${record.edit}.`) : null,
    moved ? el("p", { class: "note" }, `${sizeText(moved)} are copied in every call`) : null,
    el("p", { class: "note mono" }, record.line),
    el(
      "p",
      {},
      records.map((each) => chip(placeText(app, each), () => app.showRecord(each), "place")),
    ),
  );
}

// "layers.0.norm: add_7": the module a record is about, and its node.
function placeText(app, record) {
  const name = nodeOfRecord(record);
  const module = moduleOfRecord(app, record);
  return module ? `${module}: ${name}` : `Show ${name}`;
}

function nodeOfRecord(record) {
  return record.node || record.into[0] || record.nodes[0];
}

function moduleOfRecord(app, record) {
  const { model } = app.current();
  const names = model.memo("any", () => new Map(model.graph.nodes.map((node) => [node.name, node])));
  const node = names.get(nodeOfRecord(record));
  return node ? model.moduleOf(node) : "";
}

// Places that nobody has to look at: one line for each reason, and the first of them to go to.
function asGoodBlocks(app, records) {
  const reasons = new Map();
  for (const record of records) reasons.set(record.reason, [...(reasons.get(record.reason) || []), record]);
  return [...reasons].map(([reason, alike]) =>
    el(
      "p",
      { class: "note" },
      `${plural(alike.length, "place")}: ${reason}. `,
      chip(`Show ${alike[0].node}`, () => app.showRecord(alike[0]), ""),
    ),
  );
}

function madeTable(app, made) {
  const module = (record) => moduleOfRecord(app, record);
  const now = (record) => (record.into.length ? record.into : record.nodes);
  const inOrder = [...made].sort((a, b) => module(a).localeCompare(module(b), "en", { numeric: true }));
  const shown = inOrder.slice(0, 200);
  let above = "";
  const rows = shown.map((record) => {
    const line = record.line === above ? "" : record.line; // the same code in every layer
    above = record.line;
    return [
      el("span", { class: "mono module" }, breakable(module(record) || "the model itself")),
      chip(breakable(now(record).join(", ")), () => app.showRecord(record), "node-chip"),
      breakable(record.nodes.join(", ")),
      record.because,
      el("span", { class: "mono" }, breakable(line)),
    ];
  });
  const more = made.length > shown.length ? el("p", { class: "note" }, `and ${made.length - shown.length} more`) : null;
  return el("div", {}, table(["module", "now", "was", "because", "line"], rows), more);
}
