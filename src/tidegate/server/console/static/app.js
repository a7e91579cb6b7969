// The frame: sign-in, navigation, the stream of events, and one view at a time. A place is written in the fragment of
// the address (#/identifier?…), so that it can be linked to, and a name in it is never sent to a server by the browser.

import { h, name, replace, setText, visible } from "./dom.js";
import { Events, get, post, remove } from "./server.js";
import { liveView } from "./live.js";
import { identifierView, identifiersView } from "./identifiers.js";
import { fleetView } from "./fleet.js";
import { namespacesView, overrideDialog, overridesView } from "./catalog.js";
import { keysView } from "./keys.js";
import { whatIfView } from "./whatif.js";

const HISTORY_MAX = 300;
const THEMES = ["auto", "light", "dark"];
const app = document.getElementById("app");
const state = { tick: null, history: [], followed: null };
let session = null;
let view = null;
let frame = null;

// The choice of colours, kept in this browser.

function storedTheme() {
  try {
    return localStorage.getItem("tidegate-theme") ?? "auto";
  } catch {
    return "auto";
  }
}

function applyTheme(theme) {
  if (theme === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.setAttribute("data-theme", theme);
}

function themeButton() {
  const button = h("button", { class: "small", type: "button", onclick: () => show(THEMES[(THEMES.indexOf(button.dataset.theme) + 1) % 3]) });
  function show(theme) {
    button.dataset.theme = theme;
    setText(button, `Colours: ${theme}`);
    applyTheme(theme);
    try {
      localStorage.setItem("tidegate-theme", theme);
    } catch {
      // A browser without storage forgets the choice.
    }
  }
  show(THEMES.includes(storedTheme()) ? storedTheme() : "auto");
  return button;
}

// Places.

const PLACES = { live: "Live", identifiers: "Identifiers", fleet: "Fleet", "what-if": "What if", overrides: "Overrides", namespaces: "Namespaces", keys: "Keys" };

function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { path: path in PLACES || path === "identifier" ? path : "live", parameters: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

const address = (path, parameters) => `#/${path}${parameters ? `?${new URLSearchParams(parameters)}` : ""}`;
const go = (path, parameters) => (location.hash = address(path, parameters));
const identifierLink = (each) => h("a", { href: address("identifier", { namespace: each.namespace, identifier: each.identifier }) }, name(each.identifier));

function makeView() {
  const { path, parameters } = place();
  const given = { session, go, identifierLink, can: session.can, overrideDialog, open: (each) => go("identifier", { namespace: each.namespace, identifier: each.identifier }) };
  if (path === "identifier" && parameters.identifier) return identifierView({ ...given, identifier: parameters.identifier, namespace: parameters.namespace });
  if (path === "identifiers" || path === "identifier") return identifiersView(given);
  if (path === "fleet") return fleetView(given);
  if (path === "what-if") return whatIfView({ ...given, namespace: parameters.namespace });
  if (path === "overrides") return overridesView({ ...given, namespace: parameters.namespace });
  if (path === "namespaces") return namespacesView(given);
  if (path === "keys") return keysView(given);
  return liveView(given);
}

function showPlace({ isFirst } = {}) {
  if (session === null) return;
  view?.close?.();
  state.followed = null;
  view = makeView();
  replace(frame.main, view.node);
  document.title = `${view.title} – Tidegate`;
  const { path } = place();
  for (const link of frame.links) {
    const isHere = link.dataset.path === path || (path === "identifier" && link.dataset.path === "identifiers");
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  events.follow(view.follow ?? {});
  view.update(state);
  // A screen reader says the new place; at the first load the reader begins at the top.
  if (!isFirst) {
    frame.main.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
}

// Live.

function setState(kind) {
  if (frame === null) return;
  frame.live.className = `chip ${kind === "live" ? "good" : "warn"}`;
  setText(frame.live, kind === "live" ? "Live" : "Connecting…");
}

const events = new Events({
  state: setState,
  history: (points) => {
    const known = new Set(state.history.map((point) => point[0]));
    state.history = [...state.history, ...points.filter((point) => !known.has(point[0]))].sort((one, other) => one[0] - other[0]).slice(-HISTORY_MAX);
    view?.update(state);
  },
  tick: (tick) => {
    state.tick = tick;
    const { allowed, denied, sources } = tick.rates;
    const milliseconds = (value) => (value === null ? null : value * 1000);
    const point = [tick.at_ms, allowed, denied, sources.origin, sources.degraded, milliseconds(tick.latency_s.p50), milliseconds(tick.latency_s.p99)];
    if (!state.history.some((each) => each[0] === tick.at_ms)) state.history = [...state.history, point].slice(-HISTORY_MAX);
    setText(frame.region, tick.region ?? "");
    view?.update(state);
  },
  identifier: (found) => {
    state.followed = found;
    view?.update(state);
  },
  signedOut: () => signedOut("The session has ended."),
  refused: checkSession,
});

// The stream was refused: because the session ended, or because there are too many streams?
async function checkSession() {
  try {
    await get("session");
  } catch (error) {
    if (error.status === 401 || error.status === 403) signedOut("The session has ended.");
  }
}

// Sign-in and frame.

function signedOut(text) {
  events.stop();
  view?.close?.();
  view = null;
  session = null;
  frame = null;
  state.tick = null;
  state.history = [];
  document.title = "Sign in – Tidegate";
  const message = h("p", { class: "message bad", role: "alert", hidden: !text }, text ?? "");
  const input = h("input", { id: "key", type: "password", autocomplete: "current-password", required: true, spellcheck: "false", "aria-describedby": "key-hint" });
  const button = h("button", { class: "primary", type: "submit" }, "Sign in");
  const form = h(
    "form",
    {
      class: "card",
      onsubmit: async (event) => {
        event.preventDefault();
        button.disabled = true;
        message.hidden = true;
        try {
          signedIn(await post("session", { key: input.value.trim() }));
        } catch (error) {
          setText(message, error.message);
          message.hidden = false;
          button.disabled = false;
          input.focus();
        }
      },
    },
    h("img", { src: "console/static/icon.svg", alt: "" }),
    h("h1", null, "Tidegate console"),
    message,
    h("input", { type: "text", autocomplete: "username", value: "tidegate", hidden: true }),
    h("label", { for: "key" }, "Root key"),
    input,
    h("p", { class: "hint", id: "key-hint" }, "A key with the permission console.read. It is not stored in this browser: the server sets a cookie that ends with the day."),
    button,
  );
  replace(app, h("main", { class: "signin" }, form));
  input.focus();
}

function signedIn(about) {
  session = about;
  const main = h("main", { id: "main", tabindex: "-1" });
  const links = Object.entries(PLACES).map(([path, title]) => h("a", { href: address(path), "data-path": path }, title));
  const live = h("span", { class: "chip warn", role: "status" }, "Connecting…");
  const region = h("span", { class: "soft" });
  const signOut = h("button", { class: "small", type: "button", onclick: async () => {
    try {
      await remove("session");
    } finally {
      signedOut();
    }
  } }, "Sign out");
  const skip = h("a", { class: "skip", href: "#main", onclick: (event) => {
    event.preventDefault();
    main.focus();
  } }, "Skip to content");
  frame = { main, links, live, region };
  replace(
    app,
    skip,
    h(
      "header",
      { class: "top" },
      h("a", { class: "brand", href: address("live") }, h("img", { src: "console/static/icon.svg", alt: "" }), "Tidegate"),
      live,
      region,
      h("div", { class: "who" }, h("span", { class: "soft workspace" }, "workspace ", name(about.workspace), about.can.manage ? "" : ", read only"), themeButton(), signOut),
    ),
    h("nav", { class: "tabs", "aria-label": "Views" }, h("ul", null, links.map((link) => h("li", null, link)))),
    main,
  );
  showPlace({ isFirst: true });
}

addEventListener("hashchange", () => showPlace());
applyTheme(storedTheme());

try {
  signedIn(await get("session"));
} catch (error) {
  signedOut(error.status === 401 || error.status === 403 ? undefined : visible(error.message));
}
