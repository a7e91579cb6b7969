// What happens now: rates, latency, namespaces, sources.

import { h, name, replace, setText, syncRows, table, empty } from "./dom.js";
import { TimeChart, splitBar } from "./charts.js";
import { bytes, count, rate, seconds, share } from "./format.js";

function tile(kind, what) {
  const value = h("div", { class: "value" }, "–");
  const more = h("div", { class: "more" });
  return { node: h("li", { class: kind }, h("div", { class: "what" }, what), value, more), value, more };
}

export function liveView({ identifierLink }) {
  const tiles = {
    allowed: tile("allowed", "Allowed per second"),
    denied: tile("denied", "Denied per second"),
    latency: tile("", "Time to decide, p99"),
    origin: tile("", "Origin round trip, p99"),
    subjects: tile("", "Identifiers in memory"),
    memory: tile("", "Memory of the server"),
  };
  const decisions = new TimeChart({
    title: "Decisions per second",
    isStacked: true,
    format: rate,
    series: [
      { name: "allowed", class: "allowed", value: (point) => point[1] },
      { name: "denied", class: "denied", value: (point) => point[2] },
    ],
  });
  const latency = new TimeChart({
    title: "Time to decide",
    isStacked: false,
    isLogarithmic: true,
    format: (value) => (value === null ? "–" : seconds(value / 1000)),
    series: [
      { name: "p50", class: "p50", value: (point) => point[5] },
      { name: "p99", class: "p99", value: (point) => point[6] },
    ],
  });
  const namespaces = table("Decisions by namespace", [
    "Namespace",
    { title: "Allowed/s", class: "number" },
    { title: "Denied/s", class: "number" },
    { title: "Denied since start", class: "number" },
    "Share",
  ]);
  const sources = table("Decisions by source", ["Source", { title: "Per second", class: "number" }, "Share"]);
  const denials = table("Last denials", ["Identifier", "Namespace", "Limit", { title: "Ago", class: "number" }]);
  const node = h(
    "div",
    null,
    h("h1", null, "Live"),
    h("ul", { class: "tiles" }, Object.values(tiles).map((each) => each.node)),
    h("div", { class: "grid2" }, decisions.node, latency.node),
    h(
      "div",
      { class: "grid2" },
      h("section", { class: "card" }, h("div", { class: "title" }, h("h2", null, "By namespace"), h("span", { class: "soft" }, "this workspace")), namespaces.node),
      h(
        "div",
        { class: "stack" },
        h("section", { class: "card" }, h("div", { class: "title" }, h("h2", null, "By source"), h("span", { class: "soft" }, "where the counts came from")), sources.node),
        h("section", { class: "card" }, h("div", { class: "title" }, h("h2", null, "Last denials")), denials.node),
      ),
    ),
  );

  const SOURCES = { local: "memory of the node", origin: "after asking the origin (Redis)", degraded: "memory, while the origin does not answer" };

  function update({ tick, history }) {
    decisions.update(history);
    latency.update(history);
    if (tick === null) return;
    const { allowed, denied } = tick.rates;
    setText(tiles.allowed.value, rate(allowed));
    setText(tiles.allowed.more, `${count(tick.totals.allowed)} since start`);
    setText(tiles.denied.value, rate(denied));
    setText(tiles.denied.more, `${share(denied, allowed + denied)} of all`);
    setText(tiles.latency.value, seconds(tick.latency_s.p99));
    setText(tiles.latency.more, `p50 ${seconds(tick.latency_s.p50)}, p90 ${seconds(tick.latency_s.p90)}`);
    setText(tiles.origin.value, tick.origin_latency_s.p99 === null ? "–" : `≤ ${seconds(tick.origin_latency_s.p99)}`);
    setText(tiles.origin.more, `p50 ≤ ${seconds(tick.origin_latency_s.p50)}`);
    setText(tiles.subjects.value, count(tick.memory.subjects));
    setText(tiles.subjects.more, `${share(tick.memory.subjects, tick.memory.subjects_max)} of the bound, ${count(tick.memory.evicted)} evicted`);
    setText(tiles.memory.value, bytes(tick.memory.rss_bytes));
    setText(tiles.memory.more, `${tick.workers} ${tick.workers === 1 ? "process" : "processes"}, ${count(tick.connections)} connections`);

    const most = Math.max(1e-9, ...tick.namespaces.map((each) => each.allowed + each.denied));
    rows(namespaces.body, 5, "No decision in this workspace yet.", tick.namespaces, (each) => each.name, (each) =>
      h("tr", null, h("td", null, name(each.name)), h("td", { class: "number" }), h("td", { class: "number" }), h("td", { class: "number" }), h("td", { class: "wide" })),
      (row, each) => {
        setText(row.cells[1], rate(each.allowed));
        setText(row.cells[2], rate(each.denied));
        setText(row.cells[3], `${count(each.total_denied)} (${share(each.total_denied, each.total_denied + each.total_allowed)})`);
        replace(row.cells[4], splitBar([["allowed", each.allowed], ["denied", each.denied]], most));
      });
    const all = Object.entries(tick.rates.sources);
    const total = all.reduce((sum, [, value]) => sum + value, 0);
    syncRows(sources.body, all, ([kind]) => kind, ([kind]) =>
      h("tr", null, h("td", null, h("span", { class: `swatch ${kind}` }), SOURCES[kind]), h("td", { class: "number" }), h("td", { class: "wide" })),
      (row, [kind, value]) => {
        setText(row.cells[1], rate(value));
        replace(row.cells[2], splitBar([[kind, value]], total));
      });
    rows(denials.body, 4, "Nothing was denied lately.", tick.denials.slice(0, 8), (each) => `${each.namespace}\u0000${each.identifier}`, (each) =>
      h("tr", null, h("td", null, identifierLink(each)), h("td", null, name(each.namespace)), h("td"), h("td", { class: "number" })),
      (row, each) => {
        setText(row.cells[2], each.override_id === null ? each.rule : `${each.rule} (override)`);
        setText(row.cells[3], ago(tick.at_ms - each.at_ms));
      });
  }
  return { node, title: "Live", update };
}

export const ago = (milliseconds) => (milliseconds < 1500 ? "now" : milliseconds < 90000 ? `${Math.round(milliseconds / 1000)} s` : `${Math.round(milliseconds / 60000)} min`);

// Rows, or a sentence when there are none.
export function rows(body, columns, text, items, keyOf, make, update) {
  if (items.length === 0) {
    if (body.tidegateEmpty === undefined) {
      syncRows(body, [], keyOf, make);
      body.append((body.tidegateEmpty = empty(columns, text)));
    }
    return;
  }
  body.tidegateEmpty?.remove();
  delete body.tidegateEmpty;
  syncRows(body, items, keyOf, make, update);
}
