// Two reports of one model: what was lost, what was won.

function madeWithBoth() {
  const names = [...new Set([...Object.keys(data.made_with.before), ...Object.keys(data.made_with.after)])];
  const versions = names.map((each) => [each, data.made_with.before[each] || "", data.made_with.after[each] || ""]);
  return section("Made with", null, table(["", "before", "after"], versions));
}

function differencePage() {
  if (data.different_models) return el("div", {}, summary(data.summary), madeWithBoth());
  const neutral = data.model_changes.length > 0;
  const numberRows = data.numbers.map((each) => {
    const show = (value) =>
      each.unit === "bytes" ? sizeText(value) : each.unit === "seconds" ? timeText(value) : String(value);
    const sign = neutral ? "" : each.after < each.before ? "less" : each.after > each.before ? "more" : "";
    return [each.name, show(each.before), el("b", { class: sign }, show(each.after))];
  });
  const ruleRows = data.rules.map((rule) => {
    const change = rule.after[0] - rule.before[0];
    const text = change ? `${change > 0 ? "+" : "−"}${Math.abs(change)}` : "";
    const of = ([made, all]) => `${made} of ${all}`;
    return [
      el("span", { class: "mono" }, rule.rule),
      of(rule.before),
      of(rule.after),
      el("b", { class: neutral ? "" : change < 0 ? "more" : "less" }, text),
    ];
  });
  const changed = (data.changed || []).map((each) => [each.what, each.name, each.before, each.after]);
  return el(
    "div",
    {},
    summary(data.summary),
    changed.length
      ? section("Made differently", "What else was different.", table(["", "name", "before", "after"], changed))
      : null,
    section("Lost", "Rewrites that only the first report has.", siteTable(data.lost, "lost", "Nothing was lost.")),
    section("Won", "Rewrites that only the second report has.", siteTable(data.won, "won", "Nothing was won.")),
    section("Numbers", null, table(["", "before", "after"], numberRows, { right: [1, 2] })),
    data.rules.length
      ? section("Fusion rules", null, table(["rule", "before", "after", "change"], ruleRows, { right: [1, 2, 3] }))
      : null,
    section("New reasons", "Refusals and near misses that only the second report has.", reasonTable(data.reasons.new)),
    section("Reasons that are gone", null, reasonTable(data.reasons.gone)),
    madeWithBoth(),
  );
}

function siteTable(sites, kind, nothing) {
  if (!sites.length) return empty(nothing);
  const rows = sites.map((site) => [
    el("span", { class: `mono ${kind}` }, site.rule),
    site.where,
    String(site.times),
    site.reason,
    el("span", { class: "mono" }, site.line),
  ]);
  return table(["rule", "where", "times", kind === "lost" ? "because" : "it was not there because", "line"], rows, {
    right: [2],
  });
}

function reasonTable(reasons) {
  if (!reasons.length) return empty("None.");
  return table(
    ["rule", "reason", "line"],
    reasons.map((each) => [
      el("span", { class: "mono" }, each.rule),
      each.reason,
      el("span", { class: "mono" }, each.line),
    ]),
  );
}
