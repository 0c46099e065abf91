// The page: tabs, what is chosen, and the ways from one view to another.

const TABS = { overview, graph: null, rules, memory, streams, captures, source, code };
const TITLES = {
  overview: "Overview",
  graph: "Graph",
  rules: "Rules",
  memory: "Memory",
  streams: "Streams",
  captures: "Captures",
  source: "Source",
  code: "Code",
};

class App {
  constructor() {
    this.models = data.graphs.map((graph) => new GraphModel(graph));
    const step = this.models.length ? this.models[0].steps.length - 1 : 0;
    this.state = { tab: "overview", graph: 0, step, mode: "diff", node: null, look: "drawing", file: null, line: 0 };
    this.panels = {};
    this.stale = new Set(Object.keys(TABS));
    this.status = el("p", { class: "status", "aria-live": "polite" });
    this.graphView = new GraphView(
      (name, part) => this.chosen(name, part),
      (text) => (this.status.textContent = text),
    );
    this.search = new Search(this);
  }

  current() {
    const model = this.models[this.state.graph];
    return { model, step: model.steps[this.state.step] };
  }

  items() {
    return this.current().model.view(this.state.step, this.state.mode);
  }

  // -- the page ----------------------------------------------------------------------------------------------------

  build() {
    const tabs = Object.keys(TABS).map((name) =>
      el(
        "button",
        {
          type: "button",
          role: "tab",
          id: `tab-${name}`,
          "aria-controls": `panel-${name}`,
          onclick: () => this.open(name),
        },
        TITLES[name],
      ),
    );
    const bar = el(
      "div",
      { class: "tabs", role: "tablist", "aria-label": "Pages", onkeydown: (event) => this.tabKey(event) },
      tabs,
    );
    const panels = Object.keys(TABS).map((name) => {
      this.panels[name] = el("div", {
        role: "tabpanel",
        id: `panel-${name}`,
        "aria-labelledby": `tab-${name}`,
        class: `page page-${name}`,
        hidden: true,
      });
      return this.panels[name];
    });
    document.body.append(header(data.title, this.graphPicker()), el("nav", {}, bar), el("main", {}, panels), help());
    document.addEventListener("keydown", (event) => this.key(event));
    window.addEventListener("hashchange", () => this.fromHash());
    if (!this.fromHash()) this.open("overview");
  }

  graphPicker() {
    if (this.models.length < 2) return null;
    const options = data.graphs.map((graph, number) => el("option", { value: number }, graph.name));
    this.picker = el(
      "select",
      { "aria-label": "Graph", onchange: (event) => this.chooseGraph(Number(event.target.value)) },
      options,
    );
    return this.picker;
  }

  open(name) {
    this.state.tab = name;
    for (const [each, panel] of Object.entries(this.panels)) {
      const chosen = each === name;
      panel.hidden = !chosen;
      const tab = document.getElementById(`tab-${each}`);
      tab.setAttribute("aria-selected", chosen ? "true" : "false");
      tab.tabIndex = chosen ? 0 : -1;
    }
    if (this.stale.has(name)) {
      this.stale.delete(name);
      if (name === "graph") this.buildGraphPage();
      else
        this.panels[name].replaceChildren(
          this.models.length || name === "overview" ? this.render(name) : empty("Nothing was compiled."),
        );
      if (name === "source") this.scrollToLine();
    }
    this.toHash();
  }

  render(name) {
    return this.models.length ? TABS[name](this) : summary(data.summary, this);
  }

  buildGraphPage() {
    const model = this.models[this.state.graph];
    if (!model || !model.hasPictures) {
      this.panels.graph.replaceChildren(
        empty("No graphs were kept for this report. graphex.explain and TORCH_COMPILE_DEBUG=1 keep them."),
      );
      return;
    }
    this.steps = el("select", {
      id: "steps",
      "aria-label": "Pass",
      onchange: (event) => this.showStep(Number(event.target.value)),
    });
    this.steps.append(...model.steps.map((step, number) => el("option", { value: number }, stepLabel(step))));
    const button = (text, title, onclick, id) =>
      el("button", { type: "button", class: "button", title, onclick, id }, text);
    this.modes = el(
      "div",
      { class: "segmented", role: "group", "aria-label": "Which graph" },
      ["before", "diff", "after"].map((mode) =>
        button(
          mode === "diff" ? "Difference" : mode === "before" ? "Before" : "After",
          null,
          () => this.showMode(mode),
          `mode-${mode}`,
        ),
      ),
    );
    this.looks = button("List", "Drawing or list (l)", () => this.toggleLook(), "look");
    const inputs = el(
      "label",
      { class: "check" },
      el("input", { type: "checkbox", id: "inputs", onchange: (event) => this.showInputs(event.target.checked) }),
      "inputs",
    );
    const tools = [
      el(
        "div",
        { class: "group" },
        button("‹", "Previous pass ([)", () => this.move(-1), "previous"),
        this.steps,
        button("›", "Next pass (])", () => this.move(1), "next"),
      ),
      this.modes,
      this.search.element,
      el(
        "div",
        { class: "group" },
        this.looks,
        button("Open all", "Open every module, as far as it can be drawn", () => this.graphView.openAll(), "open-all"),
        button("Close all", "Close every module", () => this.graphView.closeAll(), "close-all"),
        button("Fit", "Show everything (0)", () => this.graphView.fit(), "fit"),
        inputs,
      ),
    ];
    this.board = el("div", { class: "board" });
    this.side = el("aside", { class: "side", "aria-label": "About the chosen node" });
    this.panels.graph.replaceChildren(
      el("div", { class: "toolbar" }, tools),
      el("div", { class: "columns" }, el("div", { class: "main-column" }, this.board, this.status), this.side),
    );
    this.drawGraph();
  }

  // -- the graph page ----------------------------------------------------------------------------------------------

  drawGraph() {
    const { model, step } = this.current();
    this.steps.value = String(this.state.step);
    const isPass = step.kind === "pass";
    this.modes.classList.toggle("off", !isPass);
    for (const mode of ["before", "diff", "after"]) {
      const pressed = isPass && mode === this.state.mode;
      const button = document.getElementById(`mode-${mode}`);
      button.setAttribute("aria-pressed", pressed ? "true" : "false");
      button.disabled = !isPass;
    }
    const items = this.items();
    if (this.state.look === "list") {
      const isDifference = isPass && this.state.mode === "diff";
      this.list = listing(model, items, this.state.node, (name) => this.selectNode(name), isDifference);
      this.board.replaceChildren(this.list);
      this.status.textContent = plural(items.length, "node");
    } else {
      this.board.replaceChildren(this.graphView.canvas);
      this.graphView.show(model, items);
    }
    if (this.state.node) this.selectNode(this.state.node);
    else this.side.replaceChildren(inspector(this, null, null));
  }

  showStep(number) {
    this.state.step = number;
    if (this.search.input.value) this.search.update();
    this.search.list.hidden = true;
    this.drawGraph();
    this.toHash();
  }

  move(by) {
    const { model } = this.current();
    const next = this.state.step + by;
    if (next >= 0 && next < model.steps.length) this.showStep(next);
  }

  showMode(mode) {
    this.state.mode = mode;
    this.showStep(this.state.step);
  }

  showInputs(shown) {
    this.graphView.withInputs = shown;
    this.drawGraph();
  }

  toggleLook() {
    this.state.look = this.state.look === "list" ? "drawing" : "list";
    this.looks.textContent = this.state.look === "list" ? "Drawing" : "List";
    this.drawGraph();
  }

  chosen(name, part) {
    this.state.node = name;
    this.side.replaceChildren(inspector(this, name, part));
    this.toHash();
  }

  selectNode(name) {
    const { model, step } = this.current();
    const known = this.items().some((item) => item.node.name === name);
    if (!known && step.kind === "pass" && model.byName(step.before).has(name)) {
      this.state.mode = "diff";
      this.state.node = name;
      this.showStep(this.state.step);
      return;
    }
    this.chosen(known ? name : null, null);
    if (!known) return;
    if (this.state.look === "list") markRow(this.list, name);
    else this.graphView.reveal(name);
    const box = document.getElementById("inputs");
    if (box) box.checked = this.graphView.withInputs;
  }

  // -- from one view to another ------------------------------------------------------------------------------------

  goTo(stepNumber, name) {
    const built = !this.stale.has("graph");
    Object.assign(this.state, { step: stepNumber, node: name });
    this.open("graph");
    if (built) this.showStep(stepNumber);
    if (this.panels.graph.getBoundingClientRect().top < 0) this.panels.graph.scrollIntoView();
  }

  showPass(number) {
    this.state.mode = "diff";
    this.goTo(number + 1, null);
  }

  showOrigin(name) {
    this.goTo(0, name);
  }

  showFinal(name) {
    this.goTo(this.current().model.steps.length - 1, name);
  }

  showRecord(record) {
    this.state.mode = "diff";
    this.goTo(record.pass + 1, nodeOfRecord(record));
  }

  showSource(file, line) {
    Object.assign(this.state, { file, line });
    this.stale.add("source");
    this.open("source");
  }

  // A link of the summary: to a page, a rule, a pass, a node or a line.
  follow(link) {
    if (link.graph !== undefined && link.graph !== this.state.graph) this.chooseGraph(link.graph);
    if (link.tab) this.open(link.tab);
    else if (link.rule !== undefined) this.showRule(link.rule);
    else if (link.pass !== undefined) this.showPass(link.pass);
    else if (link.node !== undefined) this.showNode(link.node);
    else this.showSource(link.file, link.line);
  }

  showRule(name) {
    this.open("rules");
    const block = [...this.panels.rules.querySelectorAll(".rule")].find((each) => each.dataset.rule === name);
    if (!block) return;
    block.open = true;
    block.scrollIntoView();
  }

  // A node where it stands last: in the graph that runs, or in the last pass that still had it.
  showNode(name) {
    const { model } = this.current();
    const has = (step) => model.byName(step.after).has(name);
    const last = model.steps.length - 1;
    if (has(model.steps[last])) return this.showFinal(name);
    const step = model.steps.findLastIndex(has);
    this.goTo(Math.max(step, 0), name);
  }

  // To the chosen line, or to the first that something happened to.
  scrollToLine() {
    const code = this.panels.source;
    const line = code.querySelector(".line.chosen") || (code.querySelector(".dot") || code).closest(".line");
    if (line) line.scrollIntoView({ block: "center" });
  }

  chooseGraph(number) {
    if (this.picker) this.picker.value = String(number);
    const step = this.models[number].steps.length - 1;
    Object.assign(this.state, { graph: number, step, node: null, file: null, line: 0 });
    this.stale = new Set(Object.keys(TABS));
    this.open(this.state.tab);
  }

  // -- the address and the keyboard ----------------------------------------------------------------------------------

  toHash() {
    const { tab, graph, step, mode, node, file, line } = this.state;
    const parts = { tab, graph, step, mode, node: node || "", file: file ?? "", line };
    const text = new URLSearchParams(parts).toString();
    if (location.hash.slice(1) !== text) history.replaceState(null, "", `#${text}`);
  }

  fromHash() {
    const asked = new URLSearchParams(location.hash.slice(1));
    const tab = asked.get("tab");
    if (!tab || !(tab in TABS)) return false;
    const number = (name, most, otherwise) => {
      const value = Number.parseInt(asked.get(name), 10);
      return value >= 0 && value <= most ? value : otherwise;
    };
    const graph = number("graph", this.models.length - 1, 0);
    const last = this.models.length ? this.models[graph].steps.length - 1 : 0;
    const mode = ["before", "diff", "after"].includes(asked.get("mode")) ? asked.get("mode") : "diff";
    Object.assign(this.state, { graph, mode, step: number("step", last, last), node: asked.get("node") || null });
    Object.assign(this.state, { file: number("file", data.files.length - 1, null), line: number("line", 1e7, 0) });
    if (this.picker) this.picker.value = String(graph);
    this.stale = new Set(Object.keys(TABS));
    this.open(tab);
    return true;
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") return this.escape();
    if (["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) return;
    const names = Object.keys(TABS);
    const onGraph = this.state.tab === "graph" && this.models.length && this.current().model.hasPictures;
    const actions = {
      "/": () => this.focusSearch(),
      "?": () => toggleHelp(),
      t: () => toggleTheme(),
      "[": () => onGraph && this.move(-1),
      "]": () => onGraph && this.move(1),
      b: () => onGraph && this.showMode("before"),
      a: () => onGraph && this.showMode("after"),
      d: () => onGraph && this.showMode("diff"),
      l: () => onGraph && this.toggleLook(),
    };
    names.forEach((name, index) => (actions[String(index + 1)] = () => this.open(name)));
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }

  focusSearch() {
    this.open("graph");
    this.search.input.focus();
    this.search.input.select();
  }

  escape() {
    const dialog = document.getElementById("help");
    if (dialog.open) return dialog.close();
    if (document.activeElement && document.activeElement !== document.body) document.activeElement.blur();
    else if (this.state.tab === "graph") this.graphView.select(null);
  }

  tabKey(event) {
    const names = Object.keys(TABS);
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const next = names[(names.indexOf(this.state.tab) + by + names.length) % names.length];
    this.open(next);
    document.getElementById(`tab-${next}`).focus();
  }
}

let app = null;
if (data.kind === "difference") {
  document.body.append(
    header(data.title, null),
    el("main", {}, el("div", { class: "page page-difference" }, differencePage())),
    help(),
  );
  document.addEventListener("keydown", (event) => event.key === "t" && toggleTheme());
} else {
  app = new App();
  app.build();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => app && app.graphView.restyle());
