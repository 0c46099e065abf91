// Streams as lanes, in the order the nodes are issued; events and values that cross lanes as arrows.

const LANE = 46;
const WIDE = 96; // pixels of an op that shows its name
const NARROW = 30;
const NAMED = 600; // ops, from where on names would make the lanes too long
const LEFT = 132;
const ABOUT_STREAMS = /stream|deadlock/;

function streams(app) {
  const { graph } = app.current().model;
  return el("div", {}, lanesSection(app), ...furtherRecords(graph, (kind) => ABOUT_STREAMS.test(kind)));
}

function lanesSection(app) {
  const { model } = app.current();
  const last = model.graph.runs;
  const nodes = model.nodes(last).filter((node) => node.op.startsWith("call"));
  const lanes = [...new Set(nodes.map((node) => node.stream || ""))];
  if (lanes.length < 2) {
    const text = nodes.length ? "All nodes of this graph run on the current stream." : "There are no nodes to show.";
    return section("Streams", null, empty(text));
  }
  lanes.sort((a, b) => (a === "" ? -1 : b === "" ? 1 : a.localeCompare(b)));
  const shown = nodes.filter((node) => node.computes || node.event);
  const column = new Map(shown.map((node, index) => [node.name, index]));
  const note = `${plural(lanes.length, "stream")}, ${plural(shown.length, "op")} in the order they are issued.`;
  const drawing = laneDrawing(app, model, nodes, shown, lanes, column);
  return section(
    "Streams",
    note,
    el("div", { class: "lanes", tabindex: "0", "aria-label": "Streams as lanes" }, drawing),
  );
}

function laneDrawing(app, model, nodes, shown, lanes, column) {
  const pitch = shown.length > NAMED ? NARROW : WIDE;
  const width = LEFT + shown.length * pitch + 24;
  const height = lanes.length * LANE + 4;
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  root.append(
    svg(
      "defs",
      {},
      svg(
        "marker",
        { id: "tip", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
        svg("path", { d: "M0,0 L8,4 L0,8 z", class: "tip" }),
      ),
    ),
  );
  const top = (node) => lanes.indexOf(node.stream || "") * LANE + 10;
  lanes.forEach((lane, index) => {
    root.append(
      svg("rect", { x: 0, y: index * LANE + 4, width, height: LANE - 6, class: `lane ${index % 2 ? "odd" : ""}` }),
    );
    const title = svg("text", { x: 10, y: index * LANE + 30, class: "lane-name" });
    title.textContent = cut(lane || "current", 16);
    root.append(title);
  });
  const named = new Map(nodes.map((node) => [node.name, node]));
  for (const [from, to, kind] of crossings(nodes, named, column)) {
    const x1 = LEFT + column.get(from.name) * pitch + pitch - 5;
    const x2 = LEFT + column.get(to.name) * pitch + 1;
    const [y1, y2] = [top(from) + 14, top(to) + 14];
    const bend = Math.max(24, Math.abs(x2 - x1) / 3);
    const path = `M${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}`;
    root.append(svg("path", { d: path, class: `crossing ${kind}`, "marker-end": "url(#tip)" }));
  }
  for (const node of shown) root.append(laneCell(app, node, LEFT + column.get(node.name) * pitch, top(node), pitch)); // over the arrows
  return root;
}

function laneCell(app, node, x, y, pitch) {
  const kind = node.event ? "event" : node.stream ? "placed" : "";
  const cell = svg("g", { class: `cell ${kind}`, onclick: () => app.showFinal(node.name) });
  const title = svg("title", {});
  title.textContent = `${nodeText(node)}\n${node.value}`;
  const text = svg("text", { x: x + (pitch - 4) / 2, y: y + 18 });
  const name = node.event ? node.event.join(" ") : opTitle(node.target).split(".").pop();
  text.textContent = cut(name, pitch === WIDE ? 13 : 3);
  cell.append(title, svg("rect", { x: x + 1, y, width: pitch - 6, height: 28, rx: 4 }), text);
  return cell;
}

// (from, to, kind): a recorded event and its waits; without events, the values that cross lanes.
function crossings(nodes, named, column) {
  const found = [];
  const recorded = new Map();
  const known = (node) => node && column.has(node.name);
  for (const node of nodes) {
    if (node.event && node.event[0] === "record") {
      recorded.set(node.event[1], node);
      recorded.set(node.name, node);
    } else if (node.event && known(recorded.get(node.event[1])))
      found.push([recorded.get(node.event[1]), node, "event"]);
    for (const name of node.inputs) {
      const source = named.get(name);
      if (!node.event && known(source) && known(node) && !source.event && (source.stream || "") !== (node.stream || ""))
        found.push([source, node, "value"]);
    }
  }
  return found;
}
