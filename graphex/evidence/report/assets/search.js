// Finding nodes by name, op, module, shape or source line.

const HITS_SHOWN = 60;

function searchable(model, node) {
  const line = model.lineOf(node);
  const where = line ? `${data.files[line[0]].name}:${line[1]} ${lineText(line[0], line[1])}` : "";
  return `${node.name} ${node.target} ${node.value} ${model.moduleOf(node)} ${where}`.toLowerCase();
}

function findNodes(model, items, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [];
  const texts = model.memo("search", () => new Map());
  const found = items.filter(({ node }) => {
    if (!texts.has(node)) texts.set(node, searchable(model, node));
    return words.every((word) => texts.get(node).includes(word));
  });
  const isInput = ({ node }) => node.op === "placeholder" || node.op === "get_attr";
  return [...found.filter((item) => !isInput(item)), ...found.filter(isInput)];
}

class Search {
  constructor(app) {
    this.app = app;
    this.hits = [];
    this.here = -1;
    this.input = el("input", {
      type: "search",
      id: "search",
      placeholder: "Search nodes, ops, modules, lines  ( / )",
      "aria-label": "Search nodes",
      autocomplete: "off",
      spellcheck: "false",
      oninput: () => this.update(),
      onkeydown: (event) => this.key(event),
    });
    this.list = el("div", { class: "hits", role: "list", hidden: true });
    this.count = el("span", { class: "hit-count", "aria-live": "polite" });
    this.element = el("div", { class: "search" }, this.input, this.count, this.list);
    document.addEventListener("click", (event) => {
      if (!this.element.contains(event.target)) this.list.hidden = true;
    });
  }

  update() {
    const { model } = this.app.current();
    this.hits = findNodes(model, this.app.items(), this.input.value);
    this.here = -1;
    this.app.graphView.highlight(new Set(this.hits.map((item) => item.node.name)));
    const asked = this.input.value.trim() !== "";
    this.count.textContent = asked ? plural(this.hits.length, "hit") : "";
    const rows = this.hits
      .slice(0, HITS_SHOWN)
      .map((item, number) =>
        el(
          "button",
          { type: "button", class: "hit", onclick: () => this.go(number) },
          el("span", { class: "mono" }, item.node.name),
          el("span", { class: "note" }, `${opTitle(item.node.target)}  ${model.moduleOf(item.node)}`),
        ),
      );
    this.list.replaceChildren(...rows);
    this.list.hidden = !rows.length;
  }

  go(number) {
    if (!this.hits.length) return;
    this.here = (number + this.hits.length) % this.hits.length;
    this.count.textContent = `${this.here + 1} of ${this.hits.length}`;
    this.list.hidden = true;
    this.app.selectNode(this.hits[this.here].node.name);
  }

  key(event) {
    if (event.key === "Enter") {
      event.preventDefault();
      this.go(this.here + (event.shiftKey ? -1 : 1));
    } else if (event.key === "Escape") {
      this.list.hidden = true;
      this.input.blur();
    } else if (event.key === "ArrowDown" && !this.list.hidden) {
      event.preventDefault();
      this.list.querySelector("button").focus();
    }
  }
}
