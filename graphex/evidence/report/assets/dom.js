// Making elements, and words for numbers. Strings of the model become text nodes here, never markup.

const data = JSON.parse(document.getElementById("data").textContent);

function el(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, String(value));
  }
  element.append(...children);
  return element;
}

function sizeText(count) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (Math.abs(count) < 1024) return `${Number(count.toPrecision(4))} ${unit}`;
    count /= 1024;
  }
  return `${Number(count.toPrecision(4))} GiB`;
}

function timeText(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  if (seconds < 0.0005) return `${(seconds * 1e6).toFixed(0)} µs`;
  return `${(seconds * 1000).toFixed(seconds >= 0.01 ? 0 : 1)} ms`;
}

function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

// "aten.add.Tensor" as people say it.
function opTitle(target) {
  const builtin = /^<built-in function (\w+)>$/.exec(target);
  if (builtin) return builtin[1];
  const parts = target.split(".");
  if (parts.length < 2) return target;
  return parts[0] === "aten" || parts[0] === "prims" ? parts[1] : `${parts[0]}.${parts[1]}`;
}

function chip(text, onclick, kind) {
  return el("button", { type: "button", class: `chip ${kind || ""}`, onclick }, text);
}

// A table whose head says what its columns are; a cell is a string or an element.
function table(head, rows, attributes) {
  const right = new Set((attributes || {}).right || []);
  const cell = (tag, value, column) =>
    el(tag, { class: right.has(column) ? "number" : null, "data-head": tag === "td" ? head[column] : null }, value);
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      {},
      head.some(Boolean)
        ? el(
            "thead",
            {},
            el(
              "tr",
              {},
              head.map((text, column) => cell("th", text, column)),
            ),
          )
        : null,
      el(
        "tbody",
        {},
        rows.map((row) =>
          el(
            "tr",
            {},
            row.map((value, column) => cell("td", value, column)),
          ),
        ),
      ),
    ),
  );
}

// A name that may go on in the next line after a dot or an underscore, and not inside of a word.
function breakable(name) {
  return name.split(/(?<=[._ ])/).flatMap((part, place) => (place ? [el("wbr", {}), part] : [part]));
}

function section(title, note, ...children) {
  const head = el(
    "div",
    { class: "section-head" },
    el("h2", {}, title),
    note ? el("p", { class: "note" }, note) : null,
  );
  return el("section", {}, head, ...children);
}

function empty(text) {
  return el("p", { class: "empty" }, text);
}
