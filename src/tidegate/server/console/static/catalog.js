// Overrides and namespaces: list, search, create, change, delete. The server checks every permission again.

import { h, name, newId, replace, setText, table, visible } from "./dom.js";
import { count, moment } from "./format.js";
import { get, post } from "./server.js";
import { ask, field } from "./dialogs.js";
import { rows } from "./live.js";

const UNITS = [
  ["seconds", 1000],
  ["minutes", 60000],
  ["hours", 3600000],
  ["days", 86400000],
];

function later(work, milliseconds = 300) {
  let timer = null;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(work, milliseconds);
  };
}

// A search box above a list; `load(text)` returns what to say about it.
function searchBox(label, load) {
  const id = newId("search");
  const status = h("p", { class: "soft", role: "status" });
  const input = h("input", { id, type: "search", autocomplete: "off", spellcheck: "false", maxlength: "512" });
  async function run() {
    try {
      setText(status, await load(input.value));
    } catch (error) {
      setText(status, error.message);
    }
  }
  input.addEventListener("input", later(run));
  return { node: h("div", { class: "grow" }, h("label", { for: id }, label), input), status, run };
}

// Creates or changes an override. Shows whom a pattern matches right now.
export function overrideDialog({ namespace, identifier, limit, duration, shadow, isEdit }) {
  const unit = UNITS.findLast(([, milliseconds]) => (duration ?? 60000) % milliseconds === 0) ?? UNITS[0];
  const who = h("input", { required: true, maxlength: "512", autocomplete: "off", spellcheck: "false", readonly: isEdit });
  who.value = identifier ?? "";
  const quota = h("input", { type: "number", required: true, min: "0", step: "1", inputmode: "numeric" });
  quota.value = limit ?? 100;
  const span = h("input", { type: "number", required: true, min: "1", step: "1", inputmode: "numeric" });
  span.value = (duration ?? 60000) / unit[1];
  const units = h("select", null, UNITS.map(([text, milliseconds]) => h("option", { value: milliseconds, selected: text === unit[0] }, text)));
  const trial = h("select", null, h("option", { value: "" }, "Enforce"), h("option", { value: "shadow", selected: shadow === true }, "Shadow: count and report, deny nothing"));
  const preview = h("div", { class: "hint", role: "status" });
  async function look() {
    if (!who.value.includes("*")) {
      replace(preview);
      return;
    }
    try {
      const found = await get("preview", { namespace, pattern: who.value });
      const shown = found.identifiers.slice(0, 10).map((each) =>
        h("li", null, name(each.identifier), each.applies === null ? null : h("span", null, " – override ", name(each.applies), " applies already")));
      replace(
        preview,
        h("p", null, `Matches ${count(found.matched)} of ${count(found.looked)} identifiers that are in memory now${found.is_complete ? "." : "; there are more than were looked at."}`),
        h("ul", { class: "why" }, shown),
        found.matched > shown.length ? h("p", null, `and ${count(found.matched - shown.length)} more.`) : null,
      );
    } catch (error) {
      replace(preview, h("p", null, error.message));
    }
  }
  who.addEventListener("input", later(look));
  look();
  return ask({
    title: isEdit ? "Change an override" : "New override",
    button: "Save",
    fields: [
      h("p", { class: "soft" }, "In namespace ", name(namespace)),
      field("Identifier or pattern", who, "* matches any characters. The literal identifier wins over patterns, then the pattern with most literal characters."),
      preview,
      field("Limit", quota, "0 blocks."),
      h("div", { class: "row" }, h("div", { class: "grow" }, field("Per", span)), h("div", { class: "grow" }, field("Unit", units))),
      field("Mode", trial),
    ],
    submit: () => post("ratelimit.setOverride", { namespace, identifier: who.value, limit: Number(quota.value), duration: Number(span.value) * Number(units.value), ...(trial.value === "shadow" ? { shadow: true } : {}) }),
  });
}

export function overridesView({ session, namespace, go, identifierLink }) {
  const choice = h("select", { id: newId("namespace"), onchange: () => go("overrides", { namespace: choice.value }) });
  const list = table("Overrides", ["Identifier or pattern", "Limit", "Override", { title: "", class: "actions" }]);
  list.node.firstChild.classList.add("cards");
  const add = h("button", { class: "primary", type: "button", disabled: true, onclick: () => change({}) }, "New override");
  const box = searchBox("Search", load);
  const body = h("section", { class: "card" }, list.node);
  const node = h("div", null, h("h1", null, "Overrides"), h("div", { class: "row" }, h("div", { class: "grow" }, h("label", { for: choice.id }, "Namespace"), choice), box.node, session.can.set_override ? add : null), box.status, body);

  async function change(values) {
    if (await overrideDialog({ namespace: choice.value, ...values })) await box.run();
  }

  async function drop(each) {
    const isDone = await ask({
      title: "Delete this override?",
      button: "Delete",
      isDanger: true,
      fields: [h("p", null, name(each.identifier), ` (${each.rule}) in `, name(choice.value))],
      submit: () => post("ratelimit.deleteOverride", { namespace: choice.value, identifier: each.identifier }),
    });
    if (isDone) await box.run();
  }

  async function load(text) {
    if (choice.value === "") return "This workspace has no namespace yet. The first request creates one.";
    const found = await get("overrides", { namespace: choice.value, text });
    rows(list.body, 4, found.total === 0 ? "This namespace has no overrides." : "None holds this text.", found.overrides, (each) => `${each.overrideId} ${each.limit} ${each.duration} ${each.shadow}`, (each) =>
      h(
        "tr",
        null,
        h("td", { "data-title": "Identifier" }, each.is_pattern ? name(each.identifier) : identifierLink({ namespace: choice.value, identifier: each.identifier })),
        h("td", { "data-title": "Limit" }, each.rule),
        h("td", { "data-title": "Override" }, h("code", null, each.overrideId)),
        h(
          "td",
          { class: "actions" },
          session.can.set_override ? h("button", { class: "small", type: "button", onclick: () => change({ ...each, isEdit: true }) }, "Edit", h("span", { class: "hidden" }, ` override ${visible(each.identifier)}`)) : null,
          session.can.delete_override ? h("button", { class: "small danger", type: "button", onclick: () => drop(each) }, "Delete", h("span", { class: "hidden" }, ` override ${visible(each.identifier)}`)) : null,
        ),
      ));
    return found.matched > found.overrides.length ? `${count(found.overrides.length)} of ${count(found.matched)} shown: search to see others.` : `${count(found.matched)} of ${count(found.total)}.`;
  }

  async function start() {
    try {
      const { namespaces } = await get("namespaces", {});
      const live = namespaces.filter((each) => !each.is_deleted);
      replace(choice, live.map((each) => h("option", { value: each.name, selected: each.name === namespace }, `${visible(each.name)} (${each.overrides})`)));
      if (namespace !== undefined && !live.some((each) => each.name === namespace)) choice.append(h("option", { value: namespace, selected: true }, visible(namespace)));
      add.disabled = choice.value === ""; // without a namespace the dialog can neither preview nor save
    } catch (error) {
      setText(box.status, error.message);
    }
    await box.run();
  }
  start();
  return { node, title: "Overrides", update() {} };
}

export function namespacesView({ session, go }) {
  const list = table("Namespaces", ["Namespace", "Id", { title: "Overrides", class: "number" }, "Created", "State", { title: "", class: "actions" }]);
  list.node.firstChild.classList.add("cards");
  const box = searchBox("Search", load);
  const add = h("button", { class: "primary", type: "button", onclick: create }, "New namespace");
  const node = h("div", null, h("h1", null, "Namespaces"), h("div", { class: "row" }, box.node, session.can.manage ? add : null), box.status, h("section", { class: "card" }, list.node));

  async function create() {
    const input = h("input", { required: true, maxlength: "512", autocomplete: "off", spellcheck: "false" });
    if (await ask({ title: "New namespace", button: "Create", fields: field("Name", input, "A namespace is also created by its first request."), submit: () => post("namespaces.create", { namespace: input.value }) })) await box.run();
  }

  async function mark(each, action) {
    const isDelete = action === "delete";
    const isDone = await ask({
      title: isDelete ? "Delete this namespace?" : "Restore this namespace?",
      button: isDelete ? "Delete" : "Restore",
      isDanger: isDelete,
      fields: [h("p", null, name(each.name)), h("p", { class: "soft" }, isDelete ? "Requests for it get 410 until it is restored. Its overrides are kept." : "With its overrides.")],
      submit: () => post(`namespaces.${action}`, { namespace: each.id }),
    });
    if (isDone) await box.run();
  }

  async function load(text) {
    const found = await get("namespaces", { text });
    rows(list.body, 6, found.total === 0 ? "This workspace has no namespace yet. The first request creates one." : "None holds this text.", found.namespaces, (each) => `${each.id} ${each.is_deleted} ${each.overrides}`, (each) =>
      h(
        "tr",
        null,
        h("td", { "data-title": "Namespace" }, name(each.name)),
        h("td", { "data-title": "Id" }, h("code", null, each.id)),
        h("td", { "data-title": "Overrides", class: "number" }, each.is_deleted ? count(each.overrides) : h("button", { class: "link", type: "button", onclick: () => go("overrides", { namespace: each.name }) }, count(each.overrides), h("span", { class: "hidden" }, ` overrides of ${visible(each.name)}`))),
        h("td", { "data-title": "Created" }, moment(each.created_at_ms)),
        h("td", { "data-title": "State" }, h("span", { class: `chip ${each.is_deleted ? "bad" : "good"}` }, each.is_deleted ? "deleted" : "live")),
        h("td", { class: "actions" }, session.can.manage ? h("button", { class: `small ${each.is_deleted ? "" : "danger"}`, type: "button", onclick: () => mark(each, each.is_deleted ? "restore" : "delete") }, each.is_deleted ? "Restore" : "Delete", h("span", { class: "hidden" }, ` ${visible(each.name)}`)) : null),
      ));
    return `${count(found.namespaces.length)} of ${count(found.total)}.`;
  }
  box.run();
  return { node, title: "Namespaces", update() {} };
}
