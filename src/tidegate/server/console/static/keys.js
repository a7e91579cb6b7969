// Root keys of the workspace: list, search, create, expire, revoke.

import { h, name, newId, setText, table, visible } from "./dom.js";
import { count, moment } from "./format.js";
import { get, post } from "./server.js";
import { ask, field, showOnce } from "./dialogs.js";
import { rows } from "./live.js";

const STATES = { active: "good", expired: "warn", disabled: "warn", revoked: "bad" };

export function keysView({ session }) {
  const list = table("Keys", ["Key", "Name", "Permissions", "State", "Expires", { title: "", class: "actions" }]);
  list.node.firstChild.classList.add("cards");
  const id = newId("search");
  const input = h("input", { id, type: "search", autocomplete: "off", spellcheck: "false", maxlength: "512" });
  const status = h("p", { class: "soft", role: "status" });
  const add = h("button", { class: "primary", type: "button", onclick: create }, "New key");
  const node = h("div", null, h("h1", null, "Keys"), h("div", { class: "row" }, h("div", { class: "grow" }, h("label", { for: id }, "Search"), input), session.can.manage ? add : null), status, h("section", { class: "card" }, list.node));
  let timer = null;
  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(load, 300);
  });

  async function create() {
    const who = h("input", { maxlength: "512", autocomplete: "off" });
    const days = h("input", { type: "number", min: "1", max: "36500", step: "1", inputmode: "numeric" });
    const boxes = session.permissions.map((permission) => h("input", { type: "checkbox", value: permission, checked: permission === "console.read" }));
    let made = null;
    const isDone = await ask({
      title: "New key",
      button: "Create",
      fields: [
        field("Name", who, "Who or what uses it."),
        h("fieldset", null, h("legend", null, "Permissions"), h("p", { class: "hint" }, "A key can get only what yours has. console.read alone is a read-only key for this console."), boxes.map((box) => h("label", null, box, h("code", null, visible(box.value))))),
        field("Expires after days", days, "Empty: never."),
      ],
      submit: async () => {
        made = await post("keys.create", {
          name: who.value,
          permissions: boxes.filter((box) => box.checked).map((box) => box.value).join(","),
          expires_at_ms: days.value === "" ? null : Date.now() + Number(days.value) * 86400000,
        });
      },
    });
    if (isDone) {
      await load();
      showOnce({ title: "The new key", content: [h("p", null, "It is shown only now: copy it."), h("code", { class: "secret" }, made.key)] });
    }
  }

  async function expire(each) {
    const days = h("input", { type: "number", min: "0", max: "36500", step: "1", required: true, inputmode: "numeric" });
    days.value = 30;
    if (await ask({ title: "When shall this key expire?", button: "Save", fields: [h("p", null, h("code", null, `${each.hint}…`), " ", name(each.name)), field("Days from now", days, "0: now.")], submit: () => post("keys.expire", { id: each.id, expires_at_ms: Date.now() + Number(days.value) * 86400000 }) })) await load();
  }

  async function revoke(each) {
    const isDone = await ask({
      title: "Revoke this key permanently?",
      button: "Revoke",
      isDanger: true,
      fields: [h("p", null, h("code", null, `${each.hint}…`), " ", name(each.name)), h("p", { class: "soft" }, each.is_own ? "This is the key that you signed in with: your session ends with it." : "All servers refuse it within seconds.")],
      submit: () => post("keys.revoke", { id: each.id }),
    });
    if (isDone) await load();
  }

  async function load() {
    try {
      const found = await get("keys", { text: input.value });
      rows(list.body, 6, "No key holds this text.", found.keys, (each) => `${each.id} ${each.state} ${each.expires_at_ms}`, (each) => {
        const isLive = each.state !== "revoked";
        return h(
          "tr",
          null,
          h("td", { "data-title": "Key" }, h("span", null, h("code", null, `${visible(each.hint)}…`), each.is_own ? h("span", { class: "soft" }, " (yours)") : null, h("br"), h("span", { class: "soft" }, each.id))),
          h("td", { "data-title": "Name" }, each.name === "" ? "–" : name(each.name)),
          h("td", { "data-title": "Permissions" }, h("span", null, each.permissions.map((permission, index) => [index > 0 ? h("br") : null, h("code", { title: each.without_effect[permission] ?? null }, visible(permission)), permission in each.without_effect ? h("span", { class: "soft" }, " (no effect)") : null]))),
          h("td", { "data-title": "State" }, h("span", { class: `chip ${STATES[each.state]}` }, each.state)),
          h("td", { "data-title": "Expires" }, each.expires_at_ms === null ? "never" : moment(each.expires_at_ms)),
          h(
            "td",
            { class: "actions" },
            session.can.manage && isLive ? h("button", { class: "small", type: "button", onclick: () => expire(each) }, "Expiry", h("span", { class: "hidden" }, ` of ${each.id}`)) : null,
            session.can.manage && isLive ? h("button", { class: "small danger", type: "button", onclick: () => revoke(each) }, "Revoke", h("span", { class: "hidden" }, ` ${each.id}`)) : null,
          ),
        );
      });
      setText(status, `${count(found.keys.length)} of ${count(found.total)}.`);
    } catch (error) {
      setText(status, error.message);
    }
  }
  load();
  return { node, title: "Keys", update() {} };
}
