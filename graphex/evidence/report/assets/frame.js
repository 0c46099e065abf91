// What every page has around it: the head, the table of keys, light and dark.

const KEYS = [
  ["/", "search"],
  ["1 … 8", "pages"],
  ["[ and ]", "previous and next pass"],
  ["b, a, d", "before, after, difference"],
  ["arrows", "along the edges of the drawn graph"],
  ["Enter", "open or close a module"],
  ["+, −, 0", "zoom in, out, everything"],
  ["l", "drawing or list"],
  ["t", "light or dark"],
  ["Esc", "leave a field, choose nothing"],
];

function header(title, picker) {
  const made = data.kind === "report" ? data.made_with : data.made_with.after;
  const facts = [`graphex ${made.graphex}`, `torch ${made.torch}`, made.device];
  if (data.facts && data.facts.calls) facts.push(plural(data.facts.calls, "call"));
  const worst = data.facts && data.facts.worst_difference; // a word for what is no number
  if (worst !== undefined && worst !== null)
    facts.push(`largest difference from eager ${typeof worst === "number" ? Number(worst.toPrecision(3)) : worst}`);
  const button = (text, label, onclick, id) =>
    el("button", { type: "button", class: "button plain", "aria-label": label, title: label, onclick, id }, text);
  return el(
    "header",
    {},
    el("div", { class: "brand" }, el("h1", {}, title), el("p", { class: "note" }, facts.join("  ·  "))),
    el(
      "div",
      { class: "group" },
      picker,
      button("◐", "Light or dark (t)", toggleTheme, "theme"),
      button("?", "Keys", toggleHelp, "keys"),
    ),
  );
}

function help() {
  const rows = KEYS.map(([keys, text]) => [el("dt", {}, el("kbd", {}, keys)), el("dd", {}, text)]);
  return el(
    "dialog",
    { id: "help", "aria-label": "Keys" },
    el("h2", {}, "Keys"),
    el("dl", { class: "facts" }, rows),
    el("button", { type: "button", class: "button", onclick: toggleHelp }, "Close"),
  );
}

function toggleHelp() {
  const dialog = document.getElementById("help");
  if (dialog.open) dialog.close();
  else dialog.showModal();
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function toggleTheme() {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  if (app) app.graphView.restyle();
}
