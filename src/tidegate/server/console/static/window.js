// One subject as its limiter sees it: the previous and the current cell with their parts, the window that slides over
// both, and what is in the window against the limit. It moves between two events by the clock of this browser.

import { h, s, replace, setText } from "./dom.js";
import { count, duration } from "./format.js";

const PARTS = [
  ["own", "this node"],
  ["others", "other nodes of the region"],
  ["foreign", "other regions"],
];
const HEIGHT = 210;
const TOP = 26;
const BOTTOM = 34;
const LEFT = 48;

const isCalm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

export class WindowChart {
  #subject = null;
  #receivedAt = 0;
  #width = 0;
  #frame = null;

  constructor() {
    this.svg = s("svg", { class: "window", role: "img", height: HEIGHT });
    this.gauge = h("div", { class: "gauge" });
    this.summary = h("p", { class: "summary" });
    this.legend = h("ul", { class: "legend" }, [
      h("li", null, h("span", { class: "swatch carried" }), "carried over"),
      ...PARTS.map(([kind, text]) => h("li", null, h("span", { class: `swatch ${kind}` }), text)),
      (this.creditEntry = h("li", { hidden: true }, h("span", { class: "swatch credit" }), "credit held")),
    ]);
    this.plot = h("div", { class: "plot" }, this.svg);
    this.node = h("div", { class: "windowed" }, this.summary, this.gauge, this.plot, this.legend);
    new ResizeObserver(() => {
      this.#width = Math.floor(this.plot.clientWidth);
      this.#draw();
    }).observe(this.plot);
  }

  update(subject) {
    this.#subject = subject;
    this.#receivedAt = performance.now();
    this.#draw();
    if (this.#frame === null && !isCalm()) this.#move();
  }

  stop() {
    cancelAnimationFrame(this.#frame);
    this.#frame = null;
  }

  #move() {
    this.#frame = requestAnimationFrame(() => {
      if (!this.node.isConnected) {
        this.#frame = null;
        return;
      }
      this.#draw();
      this.#move();
    });
  }

  #draw() {
    const subject = this.#subject;
    if (subject === null || this.#width === 0) return;
    const elapsed = Math.min(subject.duration_ms, subject.elapsed_ms + (performance.now() - this.#receivedAt));
    const passed = elapsed / subject.duration_ms;
    const left = 1 - passed;
    const before = subject.previous.total;
    const carried = Math.floor(before * left);
    const used = subject.current.total + carried;
    this.#drawGauge(subject, carried, used);
    this.#drawCells(subject, passed);
    const limit = subject.quota === null ? "limit unknown" : `of ${subject.rule}`;
    setText(this.summary, `${count(used)} ${limit} in the window now: ${count(subject.current.total)} in this window and ${count(carried)} carried over (${Math.round(100 * left)} % of ${count(before)}). This window ends in ${duration(subject.duration_ms - elapsed)}.`);
  }

  #drawGauge(subject, carried, used) {
    const whole = Math.max(subject.quota ?? 0, used + (subject.credit ?? 0), 1);
    const pieces = [["carried", carried], ...PARTS.map(([kind]) => [kind, subject.current[kind]])];
    this.creditEntry.hidden = subject.credit === null;
    if (subject.credit !== null) pieces.push(["credit", subject.credit]);
    const children = pieces.map(([kind, value]) => {
      const piece = h("span", { class: kind });
      piece.style.width = `${(100 * value) / whole}%`;
      return piece;
    });
    if (subject.quota !== null) {
      const mark = h("span", { class: "limit" });
      mark.style.left = `${(100 * subject.quota) / whole}%`;
      children.push(mark);
    }
    replace(this.gauge, children);
    this.gauge.classList.toggle("full", subject.quota !== null && used >= subject.quota);
  }

  #drawCells(subject, passed) {
    const width = this.#width;
    const half = (width - LEFT - 8) / 2;
    const top = Math.max(subject.quota ?? 0, subject.current.total, subject.previous.total, 1) * 1.12;
    const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - BOTTOM - TOP);
    const cells = [
      { cell: subject.previous, from: LEFT, title: "previous window", solidFrom: LEFT + passed * half, solidTo: LEFT + half },
      { cell: subject.current, from: LEFT + half, title: "current window", solidFrom: LEFT + half, solidTo: LEFT + half + passed * half },
    ];
    const drawn = cells.map(({ cell, from, title, solidFrom, solidTo }) => {
      let under = 0;
      const layers = PARTS.map(([kind]) => {
        const value = cell[kind];
        const rectangle = (x1, x2, name) =>
          x2 > x1 && value > 0
            ? s("rect", { class: name, x: x1, y: y(under + value), width: x2 - x1, height: Math.max(1, y(under) - y(under + value)) })
            : null;
        const both = [rectangle(from + 2, from + half - 2, `cell faded ${kind}`), rectangle(Math.max(solidFrom, from + 2), Math.min(solidTo, from + half - 2), `cell ${kind}`)];
        under += value;
        return both;
      });
      return [
        layers,
        s("text", { class: "axis", x: from + half / 2, y: HEIGHT - 8, "text-anchor": "middle" }, `${title}: ${count(cell.total)}`),
      ];
    });
    const now = LEFT + half + passed * half;
    const start = LEFT + passed * half;
    const baseline = HEIGHT - BOTTOM;
    const limit =
      subject.quota === null
        ? null
        : [
            s("line", { class: "limitline", x1: LEFT, x2: width - 8, y1: y(subject.quota), y2: y(subject.quota) }),
            s("text", { class: "axis strong", x: LEFT - 6, y: y(subject.quota) + 4, "text-anchor": "end" }, count(subject.quota)),
          ];
    replace(
      this.svg,
      s("line", { class: "base", x1: LEFT, x2: width - 8, y1: baseline, y2: baseline }),
      s("line", { class: "base", x1: LEFT + half, x2: LEFT + half, y1: TOP, y2: baseline + 6 }),
      drawn,
      limit,
      s("path", { class: "bracket", d: `M${start} ${TOP - 4}v-8H${now}v8` }),
      s("line", { class: "cursor", x1: now, x2: now, y1: TOP - 4, y2: baseline }),
      s("text", { class: "axis strong", x: Math.min(now, width - 20), y: baseline + 14, "text-anchor": "middle" }, "now"),
    );
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const list = (cell) => PARTS.map(([kind, text]) => `${cell[kind]} by ${text}`).join(", ");
    this.svg.setAttribute(
      "aria-label",
      `Two windows of ${duration(subject.duration_ms)}. Current: ${list(subject.current)}. Previous: ${list(subject.previous)}. Limit: ${subject.quota ?? "unknown"}.`,
    );
  }
}
