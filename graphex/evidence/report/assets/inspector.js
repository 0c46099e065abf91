// Everything that is known about one node, and the ways on from it: origins, users, memory, source.

function inspector(app, name, part) {
  if (part && !part.leaf) return groupPanel(app, part);
  const { model, step } = app.current();
  const inside = part ? part.node : null; // of a region
  const node = name && (model.byName(step.after).get(name) || model.byName(step.before).get(name) || inside);
  if (!node) {
    const hint = "Choose a node to see its shape, its memory, where it comes from and what was done with it.";
    return el("div", { class: "panel-body" }, empty(hint), legend(EFFECTS));
  }
  return el(
    "div",
    { class: "panel-body", "data-node": node.name },
    el("h3", { class: "mono" }, node.name),
    el("p", { class: "mono call" }, nodeText(node)),
    facts(app, model, step, node),
    happened(app, model, step, node),
    snippet(app, model, node),
  );
}

function facts(app, model, step, node) {
  const go = (names) => names.map((each) => chip(namedInput(app, each), () => app.selectNode(each), "node-chip"));
  const picture = model.byName(step.after).has(node.name) ? step.after : step.before;
  const rows = [
    ["value", node.value || "none"],
    ["size", node.bytes ? sizeText(node.bytes) : null],
    [
      "runs on device",
      node.op.startsWith("call") ? (node.computes ? "yes" : "no: a view, a size or a part of a tuple") : null,
    ],
    ["stream", node.stream || "current"],
    ["event", node.event ? `${node.event[0]} ${node.event[1]}` : null],
    ["memory of", go(memoryOf(node))],
    ["shares it with", go(sharers(model, picture, node))],
    ["module", model.moduleOf(node) || "the model itself"],
    ["reads", go(node.inputs)],
    ["read by", go(model.users(picture).get(node.name) || [])],
    ["origins", originsOf(node).map((each) => chip(each, () => app.showOrigin(each), "origin"))],
    ["became", step.kind === "given" ? became(app, model, node) : null],
  ];
  return el(
    "dl",
    { class: "facts" },
    rows
      .filter(([, value]) => value !== null && !(Array.isArray(value) && !value.length))
      .map(([title, value]) => [el("dt", {}, title), el("dd", {}, value)]),
  );
}

// The other nodes whose value may live in the same memory: the alias set.
function sharers(model, picture, node) {
  const owners = new Set(memoryOf(node));
  if (!owners.size) return [];
  const sharing = model
    .nodes(picture)
    .filter((other) => other !== node && memoryOf(other).some((owner) => owners.has(owner)));
  return sharing.map((other) => other.name).filter((other) => !owners.has(other));
}

function became(app, model, node) {
  const heirs = model.heirs().get(node.name) || [];
  if (!heirs.length) return ["nothing: it is not in the final graph"];
  return heirs.map((name) => chip(name, () => app.showFinal(name), "heir"));
}

function happened(app, model, step, node) {
  const found = model.records(step).get(node.name) || [];
  if (!found.length) return null;
  const items = found.map(({ effect, kind, record }) =>
    el(
      "li",
      { class: `event e-${(effect || "changed").replace(" ", "-")}` },
      el("strong", {}, record.rule),
      ` ${kind === "rewrite" ? EFFECTS[effect] || "kept for another node" : kind === "refusal" ? "refused" : "nearly matched"}`,
      el("p", {}, record.because || record.reason),
      record.edit ? el("p", { class: "edit" }, `What would help: ${record.edit}.`) : null,
      record.certificate ? certificateText(record.certificate) : null,
      kind === "rewrite" && record.nodes.length > 1
        ? el("p", { class: "note" }, `replaces ${record.nodes.join(", ")}`)
        : null,
    ),
  );
  return el("div", {}, el("h4", {}, "What happened"), el("ul", { class: "events" }, items));
}

function certificateText(certificate) {
  const text = `memory of ${certificate.storage}, last read by ${certificate.last_read}, saves ${sizeText(certificate.bytes_saved)} a call`;
  return el("p", { class: "note" }, text);
}

function snippet(app, model, node) {
  const places = model.placesOf(node);
  if (!places.length) return null;
  const [file, line] = places[places.length - 1];
  const stack = places.map(([which, number, name]) =>
    el(
      "li",
      {},
      chip(`${data.files[which].name}:${number}`, () => app.showSource(which, number), "source"),
      name ? ` ${name}` : "",
    ),
  );
  return el(
    "div",
    {},
    el("h4", {}, "Source"),
    codeLines(app, file, line - 2, line + 2, line),
    el("details", {}, el("summary", {}, plural(places.length, "frame")), el("ol", { class: "stack" }, stack)),
    el(
      "p",
      {},
      chip("Open in source", () => app.showSource(file, line), "source"),
    ),
  );
}

function groupPanel(app, part) {
  const leaves = leavesOf(part);
  const open = app.graphView.open.has(part.id);
  const counts = new Map();
  for (const leaf of leaves) {
    const title = leaf.node.op.startsWith("call") ? opTitle(leaf.node.target) : leaf.node.op;
    counts.set(title, (counts.get(title) || 0) + 1);
  }
  const rows = [...counts]
    .sort((a, b) => b[1] - a[1])
    .slice(0, 14)
    .map(([title, count]) => [title, String(count)]);
  return el(
    "div",
    { class: "panel-body" },
    el("h3", { class: "mono" }, part.id.replace(/^region (\S+ )?|#\d+$/g, "") || "the model"),
    el("p", { class: "note" }, part.region ? `compiled by Inductor: ${part.region}` : groupText(part, leaves)),
    el(
      "p",
      {},
      el(
        "button",
        { type: "button", class: "button", onclick: () => app.graphView.toggle(part) },
        `${open ? "Close" : "Open"} ${part.region ? "region" : "module"}`,
      ),
    ),
    table(["op", "nodes"], rows, { right: [1] }),
  );
}

function groupText(part, leaves) {
  return `${part.kind ? `${part.kind}, ` : ""}${plural(leaves.length, "node")}`;
}

function legend(effects) {
  const items = Object.entries(effects).map(([effect, text]) =>
    el("li", {}, el("span", { class: `swatch e-${effect.replace(" ", "-")}` }), text),
  );
  return el("ul", { class: "legend" }, items);
}
