// Talks to the server that sent this page, and to no other. Requests that change something carry a header that a form
// of another site cannot send.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function call(method, path, body) {
  let response;
  try {
    response = await fetch(`console/${path}`, {
      method,
      headers: { accept: "application/json", "content-type": "application/json", "x-tidegate-console": "1" },
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "same-origin",
      redirect: "error",
    });
  } catch {
    throw new Refused(0, "The server does not answer.");
  }
  let document = null;
  try {
    document = await response.json();
  } catch {
    throw new Refused(response.status, `The server answered ${response.status} without JSON.`);
  }
  if (!response.ok) {
    const error = document?.error ?? {};
    const more = (error.errors ?? []).map((each) => each.message).filter((text) => text && text !== error.detail);
    throw new Refused(response.status, [error.detail ?? `The server answered ${response.status}.`, ...more].join(" "));
  }
  return document;
}

const query = (parameters) =>
  new URLSearchParams(Object.entries(parameters ?? {}).filter(([, value]) => value !== undefined && value !== null && value !== "")).toString();

export const get = (path, parameters) => call("GET", parameters === undefined ? path : `${path}?${query(parameters)}`);
export const post = (path, body) => call("POST", path, body);
export const remove = (path) => call("DELETE", path);

// The stream of events. It is closed while the page is hidden, and opened again by itself after a failure.
export class Events {
  #source = null;
  #parameters = {};
  #retry = null;
  #isWanted = false;

  constructor(handlers) {
    this.handlers = handlers;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#close() : this.#open()));
  }

  follow(parameters) {
    const isSame = this.#isWanted && query(parameters) === query(this.#parameters);
    this.#parameters = parameters;
    this.#isWanted = true;
    if (isSame && this.#source !== null) return;
    this.#close();
    this.#open();
  }

  stop() {
    this.#isWanted = false;
    this.#close();
  }

  #close() {
    clearTimeout(this.#retry);
    this.#source?.close();
    this.#source = null;
  }

  #open() {
    if (!this.#isWanted || this.#source !== null || document.hidden) return;
    const source = new EventSource(`console/events?${query(this.#parameters)}`);
    this.#source = source;
    source.onopen = () => this.handlers.state("live");
    source.onerror = () => {
      this.handlers.state("lost");
      // After a refusal (401, 503) a browser gives up; after a lost connection it tries again by itself.
      if (source.readyState === EventSource.CLOSED && this.#source === source) {
        this.#source = null;
        this.handlers.refused();
        this.#retry = setTimeout(() => this.#open(), 2000);
      }
    };
    for (const kind of ["history", "tick", "identifier"])
      source.addEventListener(kind, (event) => this.handlers[kind](JSON.parse(event.data)));
    source.addEventListener("signed-out", () => this.handlers.signedOut());
  }
}
