// Builds elements. Law: a value becomes text or an attribute, never markup. Nothing here or elsewhere uses innerHTML,
// and the page's policy (Trusted Types) would refuse it.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
export const s = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);

export function replace(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// Characters that are invisible or change the direction of what follows are shown by their numbers: a name must not be
// able to look like another one.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/gu;

export const visible = (text) =>
  String(text).replace(HIDDEN, (character) => `⟨U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);

// A name that a client chose. <bdi> keeps its direction to itself; long ones are cut by the style sheet.
export const name = (text) => h("bdi", { class: "name", title: visible(text) }, visible(text));

// Updates the rows of a table body to match `items`. A row that stays is changed in place, so that the keyboard focus
// inside it is not lost.
export function syncRows(body, items, keyOf, make, update) {
  const rows = body.tidegateRows ?? (body.tidegateRows = new Map());
  const wanted = new Set(items.map(keyOf));
  for (const [key, row] of rows) {
    if (!wanted.has(key)) {
      row.remove();
      rows.delete(key);
    }
  }
  const focused = document.activeElement;
  items.forEach((item, index) => {
    const key = keyOf(item);
    let row = rows.get(key);
    if (row === undefined) rows.set(key, (row = make(item)));
    update?.(row, item);
    if (body.children[index] !== row) body.insertBefore(row, body.children[index] ?? null);
  });
  if (focused !== document.activeElement && body.contains(focused)) focused.focus({ preventScroll: true });
}

// Text that changes: touched only when it differs, so that screen readers and selections are left alone.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setClass(node, name, isOn) {
  node.classList.toggle(name, Boolean(isOn));
}

let numbers = 0;
export const newId = (prefix) => `${prefix}-${(numbers += 1)}`;

// A table with a caption for screen readers and a head; the body is returned for syncRows.
export function table(caption, columns) {
  const body = h("tbody");
  const head = h("tr", null, columns.map((column) => h("th", { scope: "col", class: column.class }, column.title ?? column)));
  const node = h("table", null, h("caption", { class: "hidden" }, caption), h("thead", null, head), body);
  return { node: h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, node), body };
}

export const empty = (columns, text) => h("tr", { class: "empty" }, h("td", { colspan: columns }, text));
