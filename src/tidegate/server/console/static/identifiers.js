// Who is limited: the hottest and the most denied identifiers, a search, and one identifier in detail.

import { h, name, newId, replace, setText, table, visible } from "./dom.js";
import { WindowChart } from "./window.js";
import { clock, count, duration, rate } from "./format.js";
import { get } from "./server.js";
import { ago, rows } from "./live.js";

export function identifiersView({ identifierLink, open }) {
  const found = table("Found identifiers", ["Identifier", "Namespace"]);
  const foundCard = h("section", { class: "card", hidden: true }, h("div", { class: "title" }, h("h2", null, "Found")), found.node);
  const status = h("p", { class: "soft", role: "status" });
  const id = newId("search");
  const input = h("input", { id, type: "search", autocomplete: "off", spellcheck: "false", maxlength: "512", placeholder: "user_123" });
  const form = h(
    "form",
    { class: "card", role: "search", onsubmit: (event) => { event.preventDefault(); search(); } },
    h("div", { class: "row" }, h("div", { class: "grow" }, h("label", { for: id }, "Find an identifier"), input), h("button", { class: "primary", type: "submit" }, "Find")),
    status,
  );
  const hot = hotTable("Hottest", "requests per second, last minute", "No request yet.");
  const denied = hotTable("Most denied", "denials per second, last minute", "Nothing was denied in the last minute.");
  const node = h("div", null, h("h1", null, "Identifiers"), h("div", { class: "stack" }, form, foundCard), h("p"), h("div", { class: "grid2" }, hot.node, denied.node));

  function hotTable(title, what, text) {
    const made = table(title, ["Identifier", "Namespace", { title: "Per second", class: "number" }]);
    const card = h("section", { class: "card" }, h("div", { class: "title" }, h("h2", null, title), h("span", { class: "soft" }, what)), made.node);
    return {
      node: card,
      update: (items) =>
        rows(made.body, 3, text, items, (each) => `${each.namespace}\u0000${each.identifier}`, (each) =>
          h("tr", null, h("td", null, identifierLink(each)), h("td", null, name(each.namespace)), h("td", { class: "number" })),
          (row, each) => setText(row.cells[2], rate(each.per_s))),
    };
  }

  async function search() {
    const text = input.value;
    if (text === "") return;
    setText(status, "Searching…");
    try {
      const answer = await get("search", { text });
      foundCard.hidden = answer.found.length === 0;
      rows(found.body, 2, "", answer.found, (each) => `${each.namespace}\u0000${each.identifier}`, (each) =>
        h("tr", null, h("td", null, identifierLink(each)), h("td", null, name(each.namespace))));
      setText(status, answer.found.length === 0 ? "Nothing in memory and no denial holds this text. Memory of an identifier ends three windows after its last request." : `${answer.found.length} found.`);
      if (answer.found.length === 1 && answer.found[0].identifier === text) open(answer.found[0]);
    } catch (error) {
      setText(status, error.message);
    }
  }

  return {
    node,
    title: "Identifiers",
    update({ tick }) {
      if (tick === null) return;
      hot.update(tick.hot);
      denied.update(tick.denied_most);
    },
  };
}

export function identifierView({ identifier, namespace, overrideDialog, can }) {
  const charts = new Map();
  const subjects = h("div", { class: "stack" });
  const reasons = h("div");
  const state = h("p", { class: "soft", role: "status" }, "Loading…");
  const node = h(
    "div",
    null,
    h("h1", null, name(identifier)),
    state,
    subjects,
    h("p"),
    h("section", { class: "card" }, h("div", { class: "title" }, h("h2", null, "Why was it denied?"), h("span", { class: "soft" }, "the last denials that this server remembers")), reasons),
  );
  let shownDenials = "";

  function update({ followed }) {
    if (followed === null || followed.identifier !== identifier) return;
    setText(state, followed.subjects.length === 0 ? "Nothing about it is in memory now: it made no request in the last three windows, or other servers serve it." : "");
    const keys = new Set();
    const isElsewhere = (each) => Number(each.namespace !== namespace);
    const ordered = followed.subjects.toSorted((one, other) => isElsewhere(one) - isElsewhere(other));
    for (const subject of ordered) {
      const key = `${subject.namespace_id} ${subject.duration_ms}`;
      keys.add(key);
      if (!charts.has(key)) {
        const made = subjectCard(subject);
        charts.set(key, made);
        subjects.append(made.node);
      }
      charts.get(key).update(subject);
    }
    for (const [key, made] of charts) {
      if (!keys.has(key)) {
        made.node.remove();
        charts.delete(key);
      }
    }
    const denials = followed.denials.filter((each) => namespace === undefined || each.namespace === namespace);
    const shownNow = JSON.stringify(denials.map((each) => [each.at_ms, each.count]));
    if (shownNow !== shownDenials) {
      shownDenials = shownNow;
      const open = new Set([...reasons.querySelectorAll("details[open]")].map((each) => each.dataset.at));
      const focused = document.activeElement?.closest?.("details")?.dataset.at;
      replace(reasons, denials.length === 0 ? h("p", { class: "soft" }, "No denial is remembered.") : denials.map((each, index) => reason(each, open, index)));
      if (focused !== undefined) reasons.querySelector(`details[data-at="${Number(focused)}"] summary`)?.focus();
    }
  }

  function reason(denial, open, index) {
    return h(
      "details",
      { "data-at": denial.at_ms, open: open.has(String(denial.at_ms)) || (open.size === 0 && index === 0) },
      h("summary", null, `${clock(denial.at_ms)} · ${visible(denial.namespace)} · ${denial.rule}${denial.count > 1 ? ` · ${count(denial.count)} denials` : ""}`),
      h("ul", { class: "why" }, denial.why.map((line) => h("li", null, visible(line)))),
    );
  }

  function subjectCard(first) {
    const chart = new WindowChart();
    const facts = h("dl", { class: "facts" });
    const views = table("The same on every worker", ["Worker", { title: "Own", class: "number" }, { title: "Others", class: "number" }, { title: "Foreign", class: "number" }, { title: "In the window", class: "number" }]);
    const viewsBox = h("div", { hidden: true }, h("h3", null, "As each worker knows it"), views.node);
    const limit = h("span", { class: "soft" });
    const edit = can.set_override ? h("button", { class: "small", type: "button", onclick: () => overrideDialog({ namespace: first.namespace, identifier, limit: first.quota ?? undefined, duration: first.duration_ms }) }, "Set another limit") : null;
    const card = h("section", { class: "card" }, h("div", { class: "title" }, h("h2", null, name(first.namespace), " · windows of ", duration(first.duration_ms)), h("span", { class: "row" }, limit, edit)), chart.node, facts, viewsBox);
    function update(subject) {
      chart.update(subject);
      const from = { override: "from an override", denial: "of its last denial", request: "of the last request in this namespace" }[subject.quota_from];
      setText(limit, subject.quota === null ? "limit unknown" : `${subject.rule}, ${from}`);
      const regions = Object.entries(subject.current.regions).map(([region, part]) => `${visible(region)} ${count(part.counted)}${part.age_ms === null ? "" : `, learned ${duration(part.age_ms)} ago`}`).join("; ");
      const shown = [
        ["Override", subject.override === null ? "none applies" : `${visible(subject.override.identifier)} (${subject.override.id})`],
        ["Counts of other nodes", subject.regional_age_ms === null ? "not shared" : `${duration(subject.regional_age_ms)} old`],
        ["Counts of other regions", subject.global_age_ms === null ? "not shared" : `${duration(subject.global_age_ms)} old${regions ? ` (${regions})` : ""}`],
        ["Not yet acknowledged by the origin", count(subject.unreplayed)],
      ];
      if (subject.reserved > 0) shown.push(["Reserved", count(subject.reserved)]);
      if (subject.credit !== null) shown.push(["Credit held by this node", count(subject.credit)]);
      else if (subject.strict_ms > 0) shown.push(["After its denial", `the origin is read before a request is allowed, for ${duration(subject.strict_ms)}`]);
      const text = JSON.stringify(shown);
      if (facts.dataset.text !== text) {
        facts.dataset.text = text;
        replace(facts, shown.map(([term, value]) => [h("dt", null, term), h("dd", null, value)]));
      }
      viewsBox.hidden = subject.views.length < 2;
      rows(views.body, 5, "", subject.views, (each) => each.node, (each) =>
        h("tr", null, h("td", null, `process ${each.pid}`), ...[1, 2, 3, 4].map(() => h("td", { class: "number" }))),
        (row, each) => [each.own, each.others, each.foreign, each.effective].forEach((value, index) => setText(row.cells[index + 1], count(value))));
    }
    return { node: card, update };
  }

  return {
    node,
    title: visible(identifier),
    // In all namespaces: two of the longest names would not fit into one address.
    follow: { identifier },
    update,
    close: () => charts.clear(),
  };
}

export { ago };
