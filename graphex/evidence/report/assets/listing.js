// The graph as text, one node a line, with what a pass did to it in the margin.

const SIGNS = { added: "+", removed: "−", changed: "~" };

function listing(model, items, selected, onSelect) {
  const rows = items.map((item) => {
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
  });
  return el("div", { class: "listing", role: "list", "aria-label": "Nodes in order" }, rows);
}

function markRow(list, name) {
  for (const row of list.querySelectorAll(".row.selected")) {
    row.classList.remove("selected");
    row.setAttribute("aria-pressed", "false");
  }
  const row = [...list.querySelectorAll(".row")].find((each) => each.dataset.node === name);
  if (!row) return;
  row.classList.add("selected");
  row.setAttribute("aria-pressed", "true");
  row.scrollIntoView({ block: "center" });
}
