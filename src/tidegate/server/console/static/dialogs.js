// Dialogs: a form with a message, and a question. Escape closes them, and the focus goes back to where it was.

import { h, newId, setText } from "./dom.js";

// fields: nodes; submit: async () => text of success or undefined. Resolves to true when it was done.
export function ask({ title, fields, button, isDanger, submit }) {
  return new Promise((resolve) => {
    const id = newId("dialog");
    const message = h("p", { class: "message bad", role: "alert", hidden: true });
    const done = h("button", { class: isDanger ? "danger" : "primary", type: "submit" }, button);
    const form = h("form", null, h("h2", { id }, title), fields, message, h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), done));
    const dialog = h("dialog", { "aria-labelledby": id }, form);
    let result = false;
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      done.disabled = true;
      message.hidden = true;
      try {
        await submit();
        result = true;
        dialog.close();
      } catch (error) {
        setText(message, error.message);
        message.hidden = false;
      } finally {
        done.disabled = false;
      }
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(result);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

export function field(text, input, hint) {
  const id = newId("field");
  input.id = id;
  const hintId = hint ? `${id}-hint` : null;
  if (hintId) input.setAttribute("aria-describedby", hintId);
  return [h("label", { for: id }, text), input, hint ? h("p", { class: "hint", id: hintId }, hint) : null];
}

// Something to read once.
export function showOnce({ title, content }) {
  const id = newId("dialog");
  const dialog = h("dialog", { "aria-labelledby": id }, h("h2", { id }, title), content, h("div", { class: "buttons" }, h("button", { class: "primary", type: "button", onclick: () => dialog.close() }, "Close")));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
