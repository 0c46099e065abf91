// The program that runs: what graphex generated for the graph, and what others generated for parts of it.

function code(app) {
  const { graph } = app.current().model;
  const parts = graph.code || [];
  if (!parts.length) return section("Generated code", null, empty("No generated code was kept for this graph."));
  const note = "What is called for this graph. With TORCH_COMPILE_DEBUG=1 it is in output_code.py, with inputs to run it.";
  const blocks = parts.map(({ title, text }) =>
    el(
      "div",
      {},
      parts.length > 1 ? el("h4", {}, title) : null,
      el("pre", { class: "code-block generated", tabindex: 0, "aria-label": title }, text),
    ),
  );
  return section("Generated code", note, blocks);
}
