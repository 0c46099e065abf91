// What is drawn of a graph: modules as boxes, closed until somebody opens them, laid out by dagre.
//
// However large a graph is, the part that is open stays small: a box with very many parts is divided into runs.

const OPEN_AT_FIRST = 64;
const OPEN_AT_MOST = 1200;
const RUN = 48;
const BORDER = 10; // inside a box
const TITLE = 16;
const FAR = 6; // a value read by more boxes than this is drawn only where it is asked for

function makeTree(model, items, withInputs) {
  const root = { id: "", path: "", label: "", kind: "", parts: [], parent: null };
  const groupAt = groupsBelow(model, root);
  const held = regionNodes(model, items);
  const owners = regionOwners(items, held);
  const boxes = new Map();
  for (const [name, nodes] of held) boxes.set(name, regionBox(model, name, nodes, groupAt));
  for (const item of items) {
    const { op, name } = item.node;
    if (!withInputs && (op === "placeholder" || op === "get_attr")) continue;
    const box = boxes.get(owners.get(name));
    const group = box ? (box.id === regionId(name) ? box : box.views) : groupAt(model.drawnModuleOf(item.node));
    const sinks = box && group === box ? box.sinks : null;
    group.parts.push({ ...item, leaf: true, id: name, parent: group, sinks });
  }
  for (const box of boxes.values()) if (box.views.parts.length) box.parts.push(box.views);
  dissolve(root);
  divide(root);
  return root;
}

// The box of a module below `root`, made when it is first asked for.
function groupsBelow(model, root) {
  const groups = new Map([["", root]]);
  const classes = new Map(model.graph.modules);
  const groupAt = (path) => {
    if (groups.has(path)) return groups.get(path);
    if (!classes.has(path)) return groupAt(path.split(".").slice(0, -1).join(".")); // a list of modules is none
    const above = path.split(".");
    do above.pop();
    while (above.length && !classes.has(above.join(".")));
    const parent = groupAt(above.join("."));
    const label = parent.path ? path.slice(parent.path.length + 1) : path;
    const id = root.id ? `${root.id} ${path}` : path;
    const group = { id, path, label, kind: classes.get(path) || "", parts: [], parent };
    groups.set(path, group);
    parent.parts.push(group);
    return group;
  };
  return groupAt;
}

// -- regions: each is a box that, open, shows the nodes it was compiled from -------------------------------------------

function regionId(name) {
  return `region ${name}`;
}

// For each region that is drawn, the nodes it was compiled from, as they stood before. The difference that made a region
// draws these beside it: there it stays a node.
function regionNodes(model, items) {
  const drawn = new Set(items.map((item) => item.node.name));
  const held = new Map();
  for (const record of model.graph.rewrites) {
    const [name] = record.into;
    if (record.rule !== "region" || !drawn.has(name) || !model.graph.passes[record.pass]) continue;
    if (record.nodes.filter((each) => drawn.has(each)).length > record.nodes.length / 2) continue;
    const before = model.byName(model.graph.passes[record.pass].before);
    const nodes = record.nodes.filter((each) => !drawn.has(each)).map((each) => before.get(each));
    held.set(name, nodes.filter(Boolean));
  }
  return held;
}

// The region that each node belongs to: its own, or the one that alone reads it or alone makes it, if it is a view.
function regionOwners(items, held) {
  const owners = new Map([...held.keys()].map((name) => [name, name]));
  const users = new Map();
  for (const { node } of items) {
    for (const name of node.inputs) {
      if (!users.has(name)) users.set(name, []);
      users.get(name).push(node.name);
    }
  }
  const join = ({ node, effect }, names) => {
    const found = new Set(names.map((name) => owners.get(name)));
    const isView = node.op.startsWith("call") && !node.computes && (!effect || effect === "changed");
    if (isView && found.size === 1 && !owners.has(node.name) && !found.has(undefined))
      owners.set(node.name, [...found][0]);
  };
  for (const item of items) join(item, item.node.inputs);
  for (const item of [...items].reverse()) join(item, users.get(item.node.name) || []);
  return owners;
}

function regionBox(model, name, nodes, groupAt) {
  const computing = nodes.filter((node) => node.computes);
  const paths = (computing.length ? computing : nodes).map((node) => model.moduleOf(node));
  const parent = groupAt(paths.length ? commonModule(paths) : "");
  const compiled = model.graph.more.find((each) => each.kind === "region" && each.region === name);
  const ops = plural(compiled ? compiled.calls : computing.length, "op");
  const where = modulesText(paths);
  const region = where ? `${ops}, ${where}` : ops;
  const box = { id: regionId(name), path: "", label: name, kind: "compiled", parts: [], parent, region };
  const inside = groupsBelow(model, box);
  const read = new Set(nodes.flatMap((node) => node.inputs));
  box.sinks = nodes.map((node) => node.name).filter((each) => !read.has(each));
  box.views = { id: `${box.id} views`, path: "", label: "views", kind: "", parts: [], parent: box };
  for (const node of nodes) {
    const group = inside(model.moduleOf(node));
    group.parts.push({ node, diff: "", effect: "", records: [], leaf: true, id: node.name, parent: group });
  }
  parent.parts.push(box);
  return box;
}

// "model.layers.0 to 3": the layers that some modules are in, or else the module around all of them.
function modulesText(paths) {
  const layers = [...new Set(paths.map((path) => (path.match(/^(?:.*?\.)?\d+(?=\.|$)/) || [""])[0]))].filter(Boolean);
  if (!layers.length) return commonModule(paths);
  const last = layers[layers.length - 1];
  return layers.length === 1 ? last : `${layers[0]} to ${last.split(".").pop()}`;
}

// A box around one thing only tells nothing: the thing itself is shown.
function dissolve(group) {
  group.parts = group.parts.map((part) => {
    if (part.leaf) return part;
    dissolve(part);
    if (part.parts.length !== 1) return part;
    const only = part.parts[0];
    only.parent = group;
    if (!only.leaf && !only.region) only.label = `${part.label}.${only.label}`;
    return only;
  });
}

function divide(group) {
  for (const part of group.parts) if (!part.leaf) divide(part);
  if (group.parts.length <= 2 * RUN) return;
  const runs = [];
  for (let first = 0; first < group.parts.length; first += RUN) {
    const parts = group.parts.slice(first, first + RUN);
    const label = `part ${runs.length + 1}`;
    const run = { id: `${group.id}#${first}`, path: "", label, kind: "", parts, parent: group };
    for (const part of parts) part.parent = run;
    runs.push(run);
  }
  group.parts = runs;
  divide(group);
}

function leavesOf(part) {
  return part.leaf ? [part] : part.parts.flatMap(leavesOf);
}

// Open boxes from the outside in, for as long as everything can be taken in at a glance (or up to `most`). At first, equal
// layers are all open or all closed. A region is opened by hand: it is long.
function openedAtFirst(root, most) {
  const open = new Set([root.id]);
  let shown = root.parts.length;
  const alike = most === OPEN_AT_FIRST ? layersLike(root) : (group) => [group];
  const waiting = root.parts.filter((part) => !part.leaf && !part.region);
  while (waiting.length) {
    const group = waiting.shift();
    const together = alike(group).filter((each) => !open.has(each.id));
    const added = together.reduce((sum, each) => sum + each.parts.length - 1, 0);
    if (shown + added > most) continue;
    open.add(group.id);
    shown += group.parts.length - 1;
    waiting.push(...group.parts.filter((part) => !part.leaf && !part.region));
  }
  return open;
}

// For each module, those that are the same but for a number: layers.0.mlp, layers.1.mlp ...
function layersLike(group, found = new Map()) {
  const pattern = `${group.kind} ${group.path.replace(/\d+/g, "*")}`;
  if (group.path) found.set(pattern, [...(found.get(pattern) || []), group]);
  for (const part of group.parts) if (!part.leaf && !part.region) layersLike(part, found);
  return (each) => (each.path ? found.get(`${each.kind} ${each.path.replace(/\d+/g, "*")}`) : [each]);
}

// What is visible with these boxes open: parts, the boxes around them, and the edges between them.
function visibleGraph(root, open, model) {
  const shown = new Map(); // node name -> the part that shows it
  const parts = [];
  const boxes = [];
  const walk = (group) => {
    for (const part of group.parts) {
      if (!part.leaf && open.has(part.id)) {
        boxes.push(part);
        walk(part);
      } else {
        parts.push(part);
        for (const leaf of leavesOf(part)) shown.set(leaf.id, part);
      }
    }
  };
  walk(root);
  const edges = new Map();
  const readers = new Map();
  for (const leaf of leavesOf(root)) {
    const target = shown.get(leaf.id);
    const inputs = leaf.sinks && target === leaf ? leaf.sinks : leaf.node.inputs;
    for (const name of inputs) {
      const source = shown.get(name);
      if (!source || source === target) continue;
      const key = `${source.leaf ? "n" : "g"}:${source.id} ${target.leaf ? "n" : "g"}:${target.id}`;
      if (edges.has(key)) edges.get(key).values.push(name);
      else edges.set(key, { source, target, values: [name], gone: false });
      if (leaf.diff === "removed") edges.get(key).gone = true;
      if (!readers.has(source)) readers.set(source, new Set());
      readers.get(source).add(target);
    }
  }
  const list = [...edges.values()];
  for (const edge of list) edge.far = isFar(edge.source, readers.get(edge.source));
  return { parts, boxes, edges: list };
}

// Whether edges from a part would hide the others. A region has many readers and is what they come from.
function isFar(part, readers) {
  return readers.size > FAR && !part.region;
}

function drawnId(part) {
  return (part.leaf ? "n:" : "g:") + part.id;
}

function drawnLabel(part) {
  if (part.region) return [`${part.label}  ${part.kind}`, part.region];
  if (!part.leaf) {
    const leaves = leavesOf(part);
    const counts = {};
    for (const leaf of leaves) if (leaf.effect) counts[leaf.effect] = (counts[leaf.effect] || 0) + 1;
    const told = Object.entries(counts).map(([effect, count]) => `${count} ${effect}`);
    const head = part.kind ? `${part.label}  ${part.kind}` : part.label;
    return [head, [plural(leaves.length, "node"), ...told].join(", ")];
  }
  const { node } = part;
  if (node.op === "placeholder") return [node.target, node.value];
  if (node.op === "output") return ["output"];
  if (node.target === "getitem") return [`[${node.args.split(", ").pop()}]`];
  return node.computes ? [opTitle(node.target), node.value] : [opTitle(node.target)];
}

function cut(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

function measure(part) {
  part.lines = drawnLabel(part)
    .filter(Boolean)
    .map((line) => cut(line, 34));
  const longest = Math.max(...part.lines.map((line) => line.length));
  part.width = Math.max(40, longest * 6.4 + 18);
  part.height = part.lines.length > 1 ? 36 : 22;
}

// Positions of everything, in pixels. Every open box is laid out by itself and then takes part in the layout of the box
// around it as one thing of its size, so the work stays small and a box keeps its shape wherever it stands.
function layOut(root, open, visible) {
  const inside = edgesInside(root, visible);
  for (const part of visible.parts) measure(part);
  const arrange = (group) => {
    const graph = new dagre.graphlib.Graph();
    graph.setGraph({ rankdir: "TB", nodesep: 14, ranksep: 24, ranker: "longest-path" });
    graph.setDefaultEdgeLabel(() => ({}));
    for (const part of group.parts) {
      if (!part.leaf && open.has(part.id)) arrange(part);
      graph.setNode(drawnId(part), { width: part.width, height: part.height, part });
    }
    for (const [source, target] of inside.get(group) || []) graph.setEdge(source, target);
    dagre.layout(graph);
    const { width, height } = graph.graph();
    for (const id of graph.nodes()) {
      const { part, x, y } = graph.node(id);
      part.inner = { x: x - width / 2, y: y - height / 2 };
    }
    group.width = Math.max(width, 7 * (group.label || "").length) + 2 * BORDER;
    group.height = height + 2 * BORDER + TITLE;
  };
  arrange(root);
  const place = (group, x, y) => {
    for (const part of group.parts) {
      part.at = { x: x + part.inner.x, y: y + part.inner.y };
      if (!part.leaf && open.has(part.id)) place(part, part.at.x, part.at.y + TITLE / 2);
    }
  };
  place(root, 0, 0);
}

// For each open box, the edges between its parts: an edge between two boxes is one between their parts' parts. A value
// that many parts read does not pull at them.
function edgesInside(root, visible) {
  const inside = new Map();
  const above = (part) => {
    const chain = [part];
    while (chain[chain.length - 1].parent) chain.push(chain[chain.length - 1].parent);
    return chain.reverse();
  };
  for (const edge of visible.edges) {
    const [from, to] = [above(edge.source), above(edge.target)];
    let level = 0;
    while (from[level + 1] === to[level + 1]) level += 1;
    const group = from[level];
    if (!inside.has(group)) inside.set(group, new Map());
    const sources = inside.get(group);
    if (!sources.has(from[level + 1])) sources.set(from[level + 1], new Set());
    sources.get(from[level + 1]).add(to[level + 1]);
  }
  for (const [group, sources] of inside) {
    const pairs = [];
    for (const [source, targets] of sources) {
      const near = isFar(source, targets) ? [...targets].slice(0, 1) : targets;
      for (const target of near) pairs.push([drawnId(source), drawnId(target)]);
    }
    inside.set(group, pairs);
  }
  return inside;
}
