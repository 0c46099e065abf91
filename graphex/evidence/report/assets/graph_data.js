// One graph through its passes: pictures, steps, and what the journal says about each node.

const EFFECTS = {
  fused: "fused",
  matched: "replaced by a fusion",
  "in place": "written in place",
  moved: "moved to a stream",
  merged: "merged with an equal node",
  removed: "removed",
  changed: "changed",
  missed: "refused or nearly matched",
};

class GraphModel {
  constructor(graph) {
    this.graph = graph;
    this.steps = this.makeSteps();
    this.cache = new Map();
  }

  get hasPictures() {
    return this.graph.pictures.length > 0;
  }

  makeSteps() {
    const { passes, pictures, runs } = this.graph;
    const steps = [{ kind: "given", label: "As given", before: 0, after: 0 }];
    passes.forEach((ran, number) => {
      steps.push({
        kind: "pass",
        label: ran.name,
        stage: ran.stage,
        ran,
        pass: number,
        before: ran.before,
        after: ran.picture,
      });
    });
    const label = runs === pictures.length - 1 ? "Final graph" : "What runs, since verification went back to it";
    steps.push({ kind: "final", label, before: 0, after: runs });
    return steps;
  }

  nodes(picture) {
    return (this.graph.pictures[picture] || []).map((place) => this.graph.nodes[place]);
  }

  memo(key, make) {
    if (!this.cache.has(key)) this.cache.set(key, make());
    return this.cache.get(key);
  }

  byName(picture) {
    return this.memo(`names ${picture}`, () => new Map(this.nodes(picture).map((node) => [node.name, node])));
  }

  users(picture) {
    return this.memo(`users ${picture}`, () => {
      const users = new Map();
      for (const node of this.nodes(picture)) {
        for (const name of node.inputs) {
          if (!users.has(name)) users.set(name, []);
          users.get(name).push(node.name);
        }
      }
      return users;
    });
  }

  // The nodes of the final graph that carry on a node of the graph as it was given.
  heirs() {
    return this.memo("heirs", () => {
      const heirs = new Map();
      for (const node of this.nodes(this.graph.runs)) {
        for (const name of originsOf(node)) {
          if (!heirs.has(name)) heirs.set(name, []);
          heirs.get(name).push(node.name);
        }
      }
      return heirs;
    });
  }

  moduleOf(node) {
    return node.module < 0 ? "" : this.graph.modules[node.module][0];
  }

  // The module a node is drawn in. One that took the place of equal nodes in other modules belongs to all of these: it
  // is drawn in the module around them, or it would look as if one of them read a value of another.
  drawnModuleOf(node) {
    const merged = this.memo("merged", () => {
      const kept = this.graph.rewrites.filter((record) => record.effect === "merged");
      return new Set(kept.flatMap((record) => record.into));
    });
    const own = this.moduleOf(node);
    if (!merged.has(node.name)) return own;
    const given = this.byName(0);
    const others = originsOf(node).filter((name) => given.has(name));
    return commonModule([own, ...others.map((name) => this.moduleOf(given.get(name)))]);
  }

  placesOf(node) {
    return node.place < 0 ? [] : this.graph.places[node.place];
  }

  lineOf(node) {
    const places = this.placesOf(node);
    return places.length ? places[places.length - 1] : null;
  }

  // Which records speak of a node in a step: all of them in "as given" and "final", those of the pass in a pass.
  records(step) {
    return this.memo(`records ${this.steps.indexOf(step)}`, () => {
      const about = new Map();
      const add = (name, effect, kind, record) => {
        if (!about.has(name)) about.set(name, []);
        about.get(name).push({ effect, kind, record });
      };
      const counts = (record) => step.kind !== "pass" || record.pass === step.pass;
      for (const record of this.graph.rewrites.filter(counts)) {
        const into = new Set(record.into);
        if (step.kind !== "final") {
          for (const name of record.nodes) {
            if (!into.has(name)) add(name, record.effect === "fused" ? "matched" : record.effect, "rewrite", record);
          }
        }
        const effect = record.effect === "merged" || record.effect === "removed" ? "" : record.effect;
        if (step.kind !== "given" || record.nodes.some((name) => into.has(name))) {
          for (const name of record.into) add(name, effect, "rewrite", record);
        }
      }
      for (const record of this.graph.refusals.filter(counts))
        add(record.node, record.nothing_lost ? "" : "missed", "refusal", record);
      for (const record of this.graph.near_misses.filter(counts)) add(record.node, "missed", "near miss", record);
      return about;
    });
  }

  // What is to be drawn in a step: nodes with their state, in order. `mode` is before, after or diff.
  view(stepNumber, mode) {
    return this.memo(`view ${stepNumber} ${mode}`, () => {
      const step = this.steps[stepNumber];
      const whole = step.kind !== "pass";
      const records = this.records(step);
      const before = this.byName(step.before);
      const after = this.byName(step.after);
      const state = (node, diff) => {
        const found = records.get(node.name) || [];
        const effects = found.map((each) => each.effect).filter(Boolean);
        let effect = effects.find((each) => each !== "missed") || effects[0] || "";
        const old = before.get(node.name);
        if (!whole && old && diff !== "removed" && (old.stream || "") !== (node.stream || "")) effect = "moved";
        if (!effect && diff === "removed") effect = "removed";
        return { node, diff: whole ? "" : diff, effect, records: found };
      };
      const differs = (node) => {
        const old = before.get(node.name);
        return !old ? "added" : old !== node ? "changed" : "";
      };
      if (whole || mode === "after")
        return this.nodes(step.after).map((node) => state(node, whole ? "" : differs(node)));
      const gone = (node) => !after.has(node.name);
      if (mode === "before") return this.nodes(step.before).map((node) => state(node, gone(node) ? "removed" : ""));
      return this.joined(step, gone).map((node) => state(node, after.has(node.name) ? differs(node) : "removed"));
    });
  }

  // The graph after a pass with what it removed put back where it stood.
  joined(step, gone) {
    const follows = new Map();
    let last = null;
    for (const node of this.nodes(step.before)) {
      if (gone(node)) {
        if (!follows.has(last)) follows.set(last, []);
        follows.get(last).push(node);
      } else last = node.name;
    }
    const result = [...(follows.get(null) || [])];
    for (const node of this.nodes(step.after)) result.push(node, ...(follows.get(node.name) || []));
    return result;
  }
}

// "layers.0.attention" for "layers.0.attention.q" and "layers.0.attention.k".
function commonModule(paths) {
  const [first, ...others] = paths.map((path) => (path ? path.split(".") : []));
  let length = 0;
  while (length < first.length && others.every((parts) => parts[length] === first[length])) length += 1;
  return first.slice(0, length).join(".");
}

function originsOf(node) {
  return node.origins === null ? [node.name] : node.origins;
}

function memoryOf(node) {
  return node.memory === null ? [node.name] : node.memory;
}

// "arg9_1 (caches[0][0])": a node, and what the user calls it where it is an input.
function namedInput(app, name) {
  const node = app.current().model.byName(0).get(name);
  return node && node.op === "placeholder" && node.target !== name ? `${name} (${node.target})` : name;
}

function nodeText(node) {
  if (node.op === "placeholder") return `${node.name} = input ${node.target}`;
  if (node.op === "output") return `return ${node.args}`;
  return `${node.name} = ${node.target}(${node.args})`;
}

function stepLabel(step) {
  if (step.kind !== "pass") return step.label;
  const delta = step.ran.nodes_after - step.ran.nodes_before;
  const what =
    step.ran.status === "changed"
      ? delta
        ? `${delta > 0 ? "+" : "−"}${Math.abs(delta)}`
        : "changed"
      : step.ran.status;
  return `${step.stage} · ${step.label} (${what})`;
}
