// Does everything converge: regions, dependencies, breakers, processes.

import { h, name, setClass, setText, table } from "./dom.js";
import { bytes, count, duration, rate, seconds } from "./format.js";
import { rows } from "./live.js";

export function fleetView() {
  const regions = table("Regions", ["Region", "State", { title: "Last heartbeat", class: "number" }, { title: "Lag of its rows", class: "number" }]);
  const dependencies = table("Dependencies", ["Dependency", "State", "Detail"]);
  const breakers = table("Circuit breakers", ["Breaker", "State"]);
  const nodes = table("Processes of this server", [
    "Process",
    "Node",
    { title: "Clock offset", class: "number" },
    { title: "Allowed/s", class: "number" },
    { title: "Denied/s", class: "number" },
    { title: "Identifiers", class: "number" },
    { title: "Memory", class: "number" },
    { title: "Waiting for origin", class: "number" },
    { title: "Up", class: "number" },
  ]);
  const about = h("p", { class: "soft" });
  const card = (title, soft, made) => h("section", { class: "card" }, h("div", { class: "title" }, h("h2", null, title), h("span", { class: "soft" }, soft)), made.node);
  const node = h(
    "div",
    null,
    h("h1", null, "Fleet"),
    about,
    h("div", { class: "grid2" }, card("Regions", "as the database knows them", regions), card("Dependencies", "decisions continue without them", dependencies)),
    h("div", { class: "stack" }, card("Processes", "the nodes of this server", nodes), card("Circuit breakers", "an open one is tried again every 5 s", breakers)),
  );
  const chip = () => h("span", { class: "chip" });
  function mark(cell, kind, text) {
    const shown = cell.firstChild;
    for (const each of ["good", "bad", "warn"]) setClass(shown, each, each === kind);
    setText(shown, text);
  }

  function update({ tick }) {
    if (tick === null) return;
    setText(about, `This server is in region ${tick.region ?? "–"}, version ${tick.version}. Other servers of the region have a console of their own.`);
    rows(regions.body, 4, "There is no other region: no shared database is set.", tick.regions, (each) => each.region, (each) =>
      h("tr", null, h("td", null, name(each.region), each.is_own ? h("span", { class: "soft" }, " (this one)") : null), h("td", null, chip()), h("td", { class: "number" }), h("td", { class: "number" })),
      (row, each) => {
        mark(row.cells[1], each.is_live ? "good" : "bad", each.is_live ? "live" : "silent");
        setText(row.cells[2], each.heartbeat_age_ms === null ? "never" : `${duration(each.heartbeat_age_ms)} ago`);
        setText(row.cells[3], each.lag_ms === null ? "–" : duration(each.lag_ms));
      });
    rows(dependencies.body, 3, "This server has none.", tick.dependencies, (each) => each.name, (each) =>
      h("tr", null, h("td", null, { origin: "Origin (Redis)", ledger: "Ledger (database)", catalog: "Catalog (keys, overrides)", counts: "Counts of this node" }[each.name] ?? each.name), h("td", null, chip()), h("td")),
      (row, each) => {
        mark(row.cells[1], each.ok ? "good" : "bad", each.ok ? "ok" : each.failing > 1 ? `down for ${each.failing} processes` : "down");
        setText(row.cells[2], each.detail);
      });
    rows(breakers.body, 2, "This server calls no other.", tick.breakers, (each) => each.name, (each) =>
      h("tr", null, h("td", null, each.name.replaceAll("_", " ")), h("td", null, chip())),
      (row, each) => mark(row.cells[1], { closed: "good", "half open": "warn", open: "bad" }[each.state], each.state));
    rows(nodes.body, 9, "", tick.nodes, (each) => each.node, (each) =>
      h("tr", null, h("td", null, String(each.pid)), h("td", null, h("code", null, each.node)), ...Array.from({ length: 7 }, () => h("td", { class: "number" }))),
      (row, each) => {
        const offset = each.clock_offset_ms;
        setText(row.cells[2], offset === null ? "–" : `${offset > 0 ? "+" : ""}${offset} ms`);
        setText(row.cells[3], rate(each.allowed));
        setText(row.cells[4], rate(each.denied));
        setText(row.cells[5], count(each.subjects));
        setText(row.cells[6], bytes(each.rss_bytes));
        setText(row.cells[7], each.dirty === 0 ? "0" : `${count(each.dirty)}, ${seconds(each.replay_lag_s)}`);
        setText(row.cells[8], duration(each.uptime_s * 1000));
      });
  }
  return { node, title: "Fleet", update };
}
