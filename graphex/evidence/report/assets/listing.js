// The graph as text, one node a line, with what a pass did to it in the margin. Of a difference the nodes that differ
// come first; all others are below them, folded.

const SIGNS = { added: "+", removed: "−", changed: "~" };

function listing(model, items, selected, onSelect, isDifference) {
  const rowOf = (item) => {
    const { node } = item;
    const effect = item.effect ? `e-${item.effect.replace(" ", "-")}` : "";
    const row = el(
      "button",
      {
        type: "button",
        class: `row ${item.diff} ${effect} ${node.name === selected ? "selected" : ""}`,
        "data-node": node.name,
        "aria-pressed": node.name === selected ? "true" : "false",
        onclick: () => onSelect(node.name),
      },
      el("span", { class: "sign" }, SIGNS[item.diff] || ""),
      el("span", { class: "code" }, nodeText(node)),
      el("span", { class: "value" }, node.value),
      el("span", { class: "where" }, item.effect ? EFFECTS[item.effect] : model.moduleOf(node)),
    );
    return row;
  };
  const differing = isDifference ? items.filter((item) => item.diff || item.effect) : [];
  const attributes = { class: "listing", role: "list", "aria-label": "Nodes in order" };
  if (!isDifference) return el("div", attributes, items.map(rowOf));
  const same = items.filter((item) => !(item.diff || item.effect));
  const rest = el(
    "details",
    { class: "unchanged", open: !differing.length },
    el("summary", {}, `${plural(same.length, "node")} without a difference`),
    same.map(rowOf),
  );
  return el("div", attributes, differing.map(rowOf), same.length ? rest : null);
}

function markRow(list, name) {
  for (const row of list.querySelectorAll(".row.selected")) {
    row.classList.remove("selected");
    row.setAttribute("aria-pressed", "false");
  }
  const row = [...list.querySelectorAll(".row")].find((each) => each.dataset.node === name);
  if (!row) return;
  const folded = row.closest("details");
  if (folded) folded.open = true;
  row.classList.add("selected");
  row.setAttribute("aria-pressed", "true");
  row.scrollIntoView({ block: "center" });
}
