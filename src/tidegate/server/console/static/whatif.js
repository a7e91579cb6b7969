// What if the limit were different: the last minutes of a namespace, replayed by the server with another limit.

import { h, newId, replace, setText, table, visible } from "./dom.js";
import { TimeChart } from "./charts.js";
import { count, duration, rate, share } from "./format.js";
import { get } from "./server.js";
import { rows } from "./live.js";

const BIN_MS = 3000;

// Denials per second in steps of three seconds, from the first request until now.
function denials({ moments, at_ms }) {
  if (moments.length === 0) return [];
  const first = moments[0].at_ms;
  // The last step is not over yet: it would look like a drop.
  const points = Array.from({ length: Math.max(1, Math.floor((at_ms - first) / BIN_MS)) }, (_, index) => [first + index * BIN_MS, 0, 0]);
  for (const each of moments) {
    const point = points[Math.floor((each.at_ms - first) / BIN_MS)];
    if (point === undefined) continue;
    point[1] += (each.denied * 1000) / BIN_MS;
    point[2] += (each.would_be_denied * 1000) / BIN_MS;
  }
  return points;
}

const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

// What the replay found, in sentences.
function summary(found) {
  if (found.requests === 0) return ["No request of this namespace was recorded in the last five minutes. Requests of gateways and requests with cost 0 are not recorded."];
  const limits = Object.keys(found.limits);
  const more = limits.length > 3 ? ` and ${limits.length - 3} more` : "";
  const who = found.is_complete ? plural(found.identifiers, "identifier") : `the busiest ${plural(found.identifiers, "identifier")}`;
  return [
    `${plural(found.requests, "request")} of ${who} in ${duration(found.seconds * 1000 || 1)}, with ${limits.slice(0, 3).join(", ")}${more}.`,
    found.newly_denied === 0 && found.newly_allowed === 0
      ? `With ${found.new_limit} nothing would have changed.`
      : `With ${found.new_limit}, ${plural(found.newly_denied, "request")} of ${plural(found.callers_newly_denied, "identifier")} would have been denied as well, and ${plural(found.newly_allowed, "denied request")} would have been allowed.`,
    `Both limits are replayed from empty counters, with the requests to this server only. The replay of the present limits agrees with ${share(found.agreed, found.requests)} of what was decided.`,
  ];
}

export function whatIfView({ namespace, identifierLink }) {
  const choice = h("select", { id: newId("namespace"), required: true });
  const limit = h("input", { id: newId("limit"), required: true, maxlength: "100", autocomplete: "off", spellcheck: "false", placeholder: "50/minute" });
  const button = h("button", { class: "primary", type: "submit" }, "Replay");
  const status = h("div", { role: "status" }, h("p", { class: "soft" }, "Replays the requests of the last five minutes with another limit, and changes nothing."));
  const form = h(
    "form",
    { class: "card", onsubmit: (event) => { event.preventDefault(); run(); } },
    h("div", { class: "row" }, h("div", { class: "grow" }, h("label", { for: choice.id }, "Namespace"), choice), h("div", { class: "grow" }, h("label", { for: limit.id }, "Other limit"), limit), button),
    status,
  );
  const chart = new TimeChart({
    title: "Denied per second",
    isStacked: false,
    format: rate,
    series: [
      { name: "with the present limits", class: "was", value: (point) => point[1] },
      { name: "with the other limit", class: "denied", value: (point) => point[2] },
    ],
  });
  const number = (title) => ({ title, class: "number" });
  const callers = table("Identifiers", ["Identifier", number("Requests"), number("Allowed"), number("Would be allowed"), number("Newly denied"), number("Newly allowed")]);
  const results = h("div", { class: "stack", hidden: true }, chart.node, h("section", { class: "card" }, h("div", { class: "title" }, h("h2", null, "Identifiers"), h("span", { class: "soft" }, "those that would be denied most come first")), callers.node));
  const node = h("div", null, h("h1", null, "What if"), h("div", { class: "stack" }, form, results));

  async function run() {
    button.disabled = true;
    try {
      const found = await get("what-if", { namespace: choice.value, limit: limit.value });
      replace(status, summary(found).map((text) => h("p", null, text)));
      results.hidden = found.requests === 0;
      chart.update(denials(found));
      rows(callers.body, 6, "", found.callers, (each) => each.identifier, (each) =>
        h("tr", null, h("td", null, identifierLink({ namespace: found.namespace, identifier: each.identifier })), ...Array.from({ length: 5 }, () => h("td", { class: "number" }))),
        (row, each) => [each.requests, each.allowed, each.would_be_allowed, each.newly_denied, each.newly_allowed].forEach((value, index) => setText(row.cells[index + 1], count(value))));
    } catch (error) {
      replace(status, h("p", { class: "message bad" }, visible(error.message)));
    } finally {
      button.disabled = false;
    }
  }

  async function start() {
    try {
      const { namespaces } = await get("namespaces", {});
      replace(choice, namespaces.filter((each) => !each.is_deleted).map((each) => h("option", { value: each.name, selected: each.name === namespace }, visible(each.name))));
      if (choice.value === "") replace(status, h("p", { class: "soft" }, "This workspace has no namespace yet. The first request creates one."));
    } catch (error) {
      replace(status, h("p", { class: "message bad" }, visible(error.message)));
    }
  }
  start();
  return { node, title: "What if", update() {} };
}
