// The drawn graph: cytoscape draws, pans and zooms; this file decides what it is given.

const LONG = 600; // pixels of an edge from where on it steps back

class GraphView {
  constructor(onSelect, onStatus) {
    this.onSelect = onSelect;
    this.onStatus = onStatus;
    this.canvas = el("div", {
      class: "canvas",
      tabindex: "0",
      role: "application",
      "aria-label": "Drawn graph. Arrow keys go along the edges, Enter opens and closes a module, plus and minus zoom.",
      onkeydown: (event) => this.key(event),
    });
    this.open = null;
    this.withInputs = false;
    this.selected = null;
    this.hits = new Set();
  }

  // Show a view of a graph. The boxes that were open stay open as long as it is the same graph.
  show(model, items) {
    if (this.model !== model) this.open = null;
    this.model = model;
    this.items = items;
    this.tree = makeTree(model, items, this.withInputs);
    if (this.open === null) this.open = openedAtFirst(this.tree, OPEN_AT_FIRST);
    this.draw();
  }

  draw(keepPlace) {
    this.visible = visibleGraph(this.tree, this.open, this.model);
    layOut(this.tree, this.open, this.visible);
    this.create();
    const { cy } = this;
    const view = keepPlace ? { zoom: cy.zoom(), pan: { ...cy.pan() } } : null;
    const elements = [];
    for (const box of this.visible.boxes) elements.push(this.boxElement(box));
    for (const part of this.visible.parts) elements.push(this.partElement(part));
    this.visible.edges.forEach((edge, number) => elements.push(this.edgeElement(edge, number)));
    cy.batch(() => {
      cy.elements().remove();
      cy.add(elements);
    });
    if (view) cy.viewport(view);
    else this.fit();
    this.mark();
    if (this.hits.size) this.highlight(this.hits);
    const closed = this.visible.parts.filter((part) => !part.leaf).length;
    const nodes = this.visible.parts.length - closed;
    const regions = this.visible.boxes.filter((box) => box.region).flatMap((box) => leavesOf(box));
    const all = new Set([...this.items.map((item) => item.node.name), ...regions.map((leaf) => leaf.id)]).size;
    this.onStatus(`${plural(all, "node")}: ${plural(closed, "closed module")} and ${plural(nodes, "node")} shown`);
  }

  create() {
    if (this.cy) return;
    this.cy = cytoscape({
      container: this.canvas,
      style: drawnStyle(),
      layout: { name: "preset" },
      minZoom: 0.03,
      maxZoom: 3,
      boxSelectionEnabled: false,
      autoungrabify: true,
    });
    this.cy.on("tap", "node", (event) => this.tapped(event.target));
    this.cy.on("dbltap", "node", (event) => this.toggle(event.target.data("part")));
    this.cy.on("tap", (event) => event.target === this.cy && this.select(null));
  }

  boxElement(box) {
    const parent = box.parent.parent === null ? undefined : drawnId(box.parent);
    const label = box.kind ? `${box.label}  ${box.kind}` : box.label;
    return { group: "nodes", data: { id: drawnId(box), parent, label, part: box }, classes: "box" };
  }

  partElement(part) {
    const parent = part.parent.parent === null ? undefined : drawnId(part.parent);
    const classes = [part.leaf ? "node" : "closed"];
    const effect = part.leaf ? part.effect : strongest(part);
    if (effect) classes.push(`e-${effect.replace(" ", "-")}`);
    if (part.leaf && part.diff === "removed") classes.push("gone");
    if (part.leaf && !part.node.computes && !part.effect) classes.push("quiet");
    const { width, height } = part;
    const label = part.lines.join("\n");
    const drawn = { id: drawnId(part), parent, label, width, height, part };
    return { group: "nodes", data: drawn, classes: classes.join(" "), position: { ...part.at } };
  }

  edgeElement(edge, number) {
    const length = Math.hypot(edge.source.at.x - edge.target.at.x, edge.source.at.y - edge.target.at.y);
    const classes = [edge.far ? "far" : "", edge.gone ? "gone" : "", length > LONG ? "long" : ""].join(" ");
    const ends = { source: drawnId(edge.source), target: drawnId(edge.target) };
    return { group: "edges", data: { id: `e${number}`, ...ends, values: edge.values.length }, classes };
  }

  tapped(element) {
    const part = element.data("part");
    this.select(part.leaf ? part.id : null, part);
  }

  // Make a node visible, by opening the boxes around it, and put it in the middle.
  reveal(name) {
    let leaf = leavesOf(this.tree).find((each) => each.id === name);
    if (!leaf && !this.withInputs && this.items.some((item) => item.node.name === name)) {
      this.withInputs = true;
      this.tree = makeTree(this.model, this.items, true);
      leaf = leavesOf(this.tree).find((each) => each.id === name);
    }
    if (!leaf) return false;
    let hidden = !this.cy || this.cy.getElementById(`n:${name}`).empty();
    for (let box = leaf.parent; box; box = box.parent) this.open.add(box.id);
    if (hidden) {
      if (this.count() > OPEN_AT_MOST) this.openOnly(leaf);
      this.draw(true);
    }
    this.selected = { id: name, part: leaf };
    this.mark();
    const found = this.cy.getElementById(`n:${name}`);
    this.cy.zoom(Math.max(this.cy.zoom(), 0.8));
    this.cy.center(found);
    return true;
  }

  count() {
    return visibleGraph(this.tree, this.open, this.model).parts.length;
  }

  openOnly(leaf) {
    this.open = new Set();
    for (let box = leaf.parent; box; box = box.parent) this.open.add(box.id);
  }

  select(name, part) {
    this.selected = part ? { id: name, part } : null;
    this.mark();
    this.onSelect(name, part);
  }

  mark() {
    const { cy } = this;
    if (!cy) return;
    cy.batch(() => {
      cy.elements(".selected, .near").removeClass("selected near");
      if (!this.selected) return;
      const chosen = cy.getElementById(drawnId(this.selected.part));
      chosen.addClass("selected");
      chosen.connectedEdges().addClass("near");
    });
  }

  // Show where the hits of a search are, also inside of closed modules.
  highlight(names) {
    this.hits = names;
    if (!this.cy) return;
    this.cy.batch(() => {
      this.cy.nodes(".hit").removeClass("hit");
      for (const part of this.visible.parts) {
        if (leavesOf(part).some((leaf) => names.has(leaf.id))) this.cy.getElementById(drawnId(part)).addClass("hit");
      }
    });
  }

  toggle(part) {
    if (!part || part.leaf) return;
    if (this.open.has(part.id)) this.open.delete(part.id);
    else this.open.add(part.id);
    this.draw(true);
    const element = this.cy.getElementById(drawnId(part));
    if (element.nonempty()) this.cy.center(element);
    this.select(null, part);
  }

  openAll() {
    this.open = openedAtFirst(this.tree, OPEN_AT_MOST);
    this.draw();
  }

  closeAll() {
    this.open = new Set([this.tree.id]);
    this.draw();
  }

  fit() {
    if (!this.cy) return;
    this.cy.resize();
    this.cy.fit(undefined, 24);
    if (this.cy.zoom() > 1.1) {
      this.cy.zoom(1.1);
      this.cy.center();
    }
    if (this.cy.zoom() < 0.35) this.toTop();
  }

  // Too tall to be read as a whole: begin where the graph begins.
  toTop() {
    const bounds = this.cy.elements().boundingBox();
    const zoom = Math.min(0.75, Math.max(0.35, (this.cy.width() - 48) / bounds.w));
    this.cy.viewport({
      zoom,
      pan: { x: this.cy.width() / 2 - ((bounds.x1 + bounds.x2) / 2) * zoom, y: 24 - bounds.y1 * zoom },
    });
  }

  zoom(factor) {
    this.cy.zoom({
      level: this.cy.zoom() * factor,
      renderedPosition: { x: this.cy.width() / 2, y: this.cy.height() / 2 },
    });
  }

  restyle() {
    if (this.cy) this.cy.style(drawnStyle());
  }

  key(event) {
    const keys = {
      ArrowDown: () => this.along("outgoers"),
      ArrowUp: () => this.along("incomers"),
      ArrowRight: () => this.beside(1),
      ArrowLeft: () => this.beside(-1),
      Enter: () => this.selected && this.toggle(this.selected.part),
      "+": () => this.zoom(1.3),
      "=": () => this.zoom(1.3),
      "-": () => this.zoom(1 / 1.3),
      0: () => this.fit(),
    };
    const action = keys[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    action();
  }

  goTo(part) {
    this.select(part.leaf ? part.id : null, part);
    this.cy.center(this.cy.getElementById(drawnId(part)));
  }

  along(direction) {
    if (!this.selected) return this.visible.parts.length && this.goTo(this.visible.parts[0]);
    const next = this.cy.getElementById(drawnId(this.selected.part))[direction]("node");
    return next.nonempty() && this.goTo(next[0].data("part"));
  }

  beside(step) {
    const { parts } = this.visible;
    const here = this.selected
      ? parts.indexOf(parts.find((part) => drawnId(part) === drawnId(this.selected.part)))
      : -1;
    const next = parts[here + step];
    return next && this.goTo(next);
  }
}

function strongest(part) {
  const effects = new Set(leavesOf(part).map((leaf) => leaf.effect));
  return (
    ["missed", "fused", "in place", "moved", "matched", "merged", "removed", "changed"].find((each) =>
      effects.has(each),
    ) || ""
  );
}

// A colour of the style sheet as the canvas needs it: a property by itself still says "light-dark(...)".
function color(name) {
  const probe = el("i", { style: { color: `var(${name})` } });
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function drawnStyle() {
  const mono = 'ui-monospace, "SF Mono", Menlo, Consolas, monospace';
  const base = {
    shape: "round-rectangle",
    "background-color": color("--node"),
    "border-width": 1,
    "border-color": color("--node-border"),
    color: color("--text"),
    "font-family": mono,
    "font-size": 10.5,
  };
  const styles = [
    { selector: "node", style: base },
    {
      selector: "node.node, node.closed",
      style: {
        width: "data(width)",
        height: "data(height)",
        label: "data(label)",
        "text-wrap": "wrap",
        "text-valign": "center",
        "text-halign": "center",
        "line-height": 1.25,
        "min-zoomed-font-size": 5,
      },
    },
    {
      selector: "node.closed",
      style: { "border-style": "double", "border-width": 4, "background-color": color("--closed") },
    },
    { selector: "node.quiet", style: { color: color("--muted"), "background-color": color("--surface") } },
    {
      selector: "node.box",
      style: {
        label: "data(label)",
        "text-valign": "top",
        "text-halign": "center",
        "text-margin-y": -3,
        "font-size": 10.5,
        color: color("--muted"),
        "background-color": color("--box"),
        "background-opacity": 0.5,
        "border-color": color("--line"),
        padding: 8,
        "min-zoomed-font-size": 5,
      },
    },
    {
      selector: "edge",
      style: {
        width: 1.2,
        "line-color": color("--edge"),
        "target-arrow-color": color("--edge"),
        "target-arrow-shape": "triangle",
        "arrow-scale": 0.7,
        "curve-style": "bezier",
      },
    },
    { selector: "edge.gone", style: { "line-style": "dashed", opacity: 0.6 } },
    { selector: "edge.long", style: { opacity: 0.35 } },
    { selector: "edge.far", style: { display: "none" } },
    {
      selector: "edge.near",
      style: {
        display: "element",
        opacity: 1,
        width: 2.2,
        "line-color": color("--accent"),
        "target-arrow-color": color("--accent"),
      },
    },
  ];
  for (const effect of Object.keys(EFFECTS)) {
    const name = effect.replace(" ", "-");
    const fill = {
      "background-color": color(`--${name}-back`),
      "border-color": color(`--${name}`),
      "border-width": 1.6,
    };
    styles.push({ selector: `node.e-${name}`, style: { ...fill, color: color("--text") } });
    styles.push({ selector: `node.closed.e-${name}`, style: { "border-width": 4 } });
  }
  styles.push({
    selector: "node.gone",
    style: { "border-style": "dashed", "background-opacity": 0.45, "text-opacity": 0.75 },
  });
  styles.push({
    selector: "node.hit",
    style: { "underlay-color": color("--missed"), "underlay-opacity": 0.35, "underlay-padding": 5 },
  });
  styles.push({
    selector: "node.selected",
    style: { "border-color": color("--accent"), "border-width": 3, "border-style": "solid" },
  });
  return styles;
}
