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
  const root = { id: "", label: "", kind: "", parts: [], parent: null };
  const groups = new Map([["", root]]);
  const classes = new Map(model.graph.modules);
  const groupAt = (path) => {
    if (groups.has(path)) return groups.get(path);
    if (!classes.has(path)) return groupAt(path.split(".").slice(0, -1).join(".")); // a list of modules is none
    const above = path.split(".");
    do above.pop();
    while (above.length && !classes.has(above.join(".")));
    const parent = groupAt(above.join("."));
    const label = parent.id ? path.slice(parent.id.length + 1) : path;
    const group = { id: path, label, kind: classes.get(path) || "", parts: [], parent };
    groups.set(path, group);
    parent.parts.push(group);
    return group;
  };
  for (const item of items) {
    const { op } = item.node;
    if (!withInputs && (op === "placeholder" || op === "get_attr")) continue;
    const group = groupAt(model.drawnModuleOf(item.node));
    group.parts.push({ ...item, leaf: true, id: item.node.name, parent: group });
  }
  dissolve(root);
  divide(root);
  return root;
}

// A box around one thing only tells nothing: the thing itself is shown.
function dissolve(group) {
  group.parts = group.parts.map((part) => {
    if (part.leaf) return part;
    dissolve(part);
    if (part.parts.length !== 1) return part;
    const only = part.parts[0];
    only.parent = group;
    if (!only.leaf) only.label = `${part.label}.${only.label}`;
    return only;
  });
}

function divide(group) {
  for (const part of group.parts) if (!part.leaf) divide(part);
  if (group.parts.length <= 2 * RUN) return;
  const runs = [];
  for (let first = 0; first < group.parts.length; first += RUN) {
    const parts = group.parts.slice(first, first + RUN);
    const run = { id: `${group.id}#${first}`, label: `part ${runs.length + 1}`, kind: "", parts, parent: group };
    for (const part of parts) part.parent = run;
    runs.push(run);
  }
  group.parts = runs;
  divide(group);
}

function leavesOf(part) {
  return part.leaf ? [part] : part.parts.flatMap(leavesOf);
}

// Open boxes from the outside in, for as long as everything can be taken in at a glance (or up to `most`).
function openedAtFirst(root, most) {
  const open = new Set([root.id]);
  let shown = root.parts.length;
  const waiting = root.parts.filter((part) => !part.leaf);
  while (waiting.length) {
    const group = waiting.shift();
    if (shown - 1 + group.parts.length > most) continue;
    open.add(group.id);
    shown += group.parts.length - 1;
    waiting.push(...group.parts.filter((part) => !part.leaf));
  }
  return open;
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
    for (const name of leaf.node.inputs) {
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
  for (const edge of list) edge.far = readers.get(edge.source).size > FAR;
  return { parts, boxes, edges: list };
}

function drawnId(part) {
  return (part.leaf ? "n:" : "g:") + part.id;
}

function drawnLabel(part) {
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
      const near = targets.size > FAR ? [...targets].slice(0, 1) : targets;
      for (const target of near) pairs.push([drawnId(source), drawnId(target)]);
    }
    inside.set(group, pairs);
  }
  return inside;
}
