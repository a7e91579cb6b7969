// Charts over time, drawn as SVG at the size of their place. A chart is an image to a screen reader: its label says the
// latest values, and the page shows the same numbers as text.

import { h, s, replace, setText } from "./dom.js";
import { clock } from "./format.js";

const SPAN_MAX_MS = 5 * 60 * 1000;
const SPAN_MIN_MS = 60 * 1000;
const HEIGHT = 220;
const LEFT = 56;
const BOTTOM = 22;
const TOP = 10;

// A round number of steps from 0 to at least `value`.
export function ticksUpTo(value) {
  const raw = Math.max(value, 1e-9) / 4;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw);
  return [0, 1, 2, 3, 4].map((index) => index * step);
}

// Powers of ten around all values, for what spans several of them.
export function powersAround(values) {
  const seen = values.filter((value) => value > 0);
  if (seen.length === 0) return [0.1, 1, 10];
  const low = Math.floor(Math.log10(Math.min(...seen)));
  const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...seen))));
  return Array.from({ length: high - low + 1 }, (_, index) => 10 ** (low + index));
}

export class TimeChart {
  #points = [];
  #width = 0;
  #hover = null;

  // series: [{name, class, value: point => number|null}], from the bottom up if stacked
  constructor({ title, series, format, isStacked, isLogarithmic, height }) {
    Object.assign(this, { title, series, format, isStacked, isLogarithmic, height: height ?? HEIGHT });
    this.svg = s("svg", { class: "chart", role: "img", height: this.height });
    this.tip = h("div", { class: "tip", "aria-hidden": "true" });
    this.legend = h(
      "ul",
      { class: "legend" },
      series.map((each) => h("li", null, h("span", { class: `swatch ${each.class}` }), each.name)),
    );
    this.plot = h("div", { class: "plot" }, this.svg, this.tip);
    this.node = h("figure", { class: "card" }, h("figcaption", null, h("h2", null, title), this.legend), this.plot);
    new ResizeObserver(() => {
      const width = Math.floor(this.plot.clientWidth);
      if (width > 0 && width !== this.#width) {
        this.#width = width;
        this.#draw();
      }
    }).observe(this.plot);
    this.plot.addEventListener("pointermove", (event) => {
      this.#hover = event.clientX - this.plot.getBoundingClientRect().left;
      this.#draw();
    });
    this.plot.addEventListener("pointerleave", () => {
      this.#hover = null;
      this.#draw();
    });
  }

  update(points) {
    this.#points = points;
    this.#draw();
  }

  #draw() {
    const width = this.#width;
    if (width === 0) return;
    const points = this.#points;
    const now = points.length > 0 ? points[points.length - 1][0] : Date.now();
    const span = Math.min(SPAN_MAX_MS, Math.max(SPAN_MIN_MS, points.length > 0 ? now - points[0][0] : 0));
    const shown = points.filter((point) => point[0] >= now - span);
    const stacks = shown.map((point) => {
      let sum = 0;
      return this.series.map((each) => {
        const value = each.value(point);
        if (!this.isStacked) return value;
        sum += value ?? 0;
        return sum;
      });
    });
    const values = stacks.flat().filter((value) => value !== null);
    const ticks = this.isLogarithmic ? powersAround(values) : ticksUpTo(Math.max(0, ...values) || 1);
    const top = ticks[ticks.length - 1];
    const part = (value) => (this.isLogarithmic ? Math.log10(Math.max(value, ticks[0]) / ticks[0]) / Math.log10(top / ticks[0]) : value / top);
    const x = (at) => LEFT + ((at - (now - span)) / span) * (width - LEFT - 4);
    const y = (value) => this.height - BOTTOM - part(value) * (this.height - BOTTOM - TOP);
    const grid = ticks.map((tick) => [
      s("line", { class: "grid", x1: LEFT, x2: width - 4, y1: y(tick), y2: y(tick) }),
      s("text", { class: "axis", x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, this.format(tick)),
    ]);
    const step = span > 2 * SPAN_MIN_MS ? 60 : width < 420 ? 30 : 15;
    const times = [];
    for (let ago = 0; ago * 1000 <= span; ago += step) {
      const text = ago === 0 ? "now" : ago % 60 === 0 ? `−${ago / 60} min` : `−${ago} s`;
      const at = x(now - ago * 1000);
      if (at > LEFT + 10 || ago === 0) times.push(s("text", { class: "axis", x: at, y: this.height - 5, "text-anchor": ago === 0 ? "end" : "middle" }, text));
    }
    const layers = this.series.map((each, index) => this.#layer(each, index, shown, stacks, x, y)).reverse();
    replace(this.svg, grid, times, layers, this.#marker(shown, stacks, x, y));
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    const last = shown[shown.length - 1];
    const latest = this.series.map((each) => `${each.name} ${last ? this.format(each.value(last)) : "unknown"}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}, the last minutes. Now: ${latest}.`);
  }

  #layer(each, index, shown, stacks, x, y) {
    // A pause of more than three seconds is a gap, not a line across it.
    const runs = [];
    let previous = null;
    shown.forEach((point, at) => {
      const value = stacks[at][index];
      if (value === null) {
        previous = null;
        return;
      }
      if (previous === null || point[0] - previous > 3500) runs.push([]);
      const under = this.isStacked && index > 0 ? stacks[at][index - 1] : 0;
      runs[runs.length - 1].push([x(point[0]), y(value), y(under)]);
      previous = point[0];
    });
    return runs.map((run) => {
      const upper = run.map(([px, py]) => `${px.toFixed(1)},${py.toFixed(1)}`);
      const line = s("polyline", { class: `line ${each.class}`, points: upper.join(" ") });
      if (!this.isStacked) return line;
      const lower = run.map(([px, , py]) => `${px.toFixed(1)},${py.toFixed(1)}`).reverse();
      return [s("polygon", { class: `area ${each.class}`, points: [...upper, ...lower].join(" ") }), line];
    });
  }

  #marker(shown, stacks, x, y) {
    this.tip.classList.remove("shown");
    if (this.#hover === null || shown.length === 0) return null;
    let nearest = 0;
    shown.forEach((point, index) => {
      if (Math.abs(x(point[0]) - this.#hover) < Math.abs(x(shown[nearest][0]) - this.#hover)) nearest = index;
    });
    const at = x(shown[nearest][0]);
    const lines = this.series.map((each) => `${each.name}: ${this.format(each.value(shown[nearest]))}`);
    setText(this.tip, [clock(shown[nearest][0]), ...lines].join("\n"));
    this.tip.classList.add("shown");
    const isRight = at > this.#width / 2;
    this.tip.style.left = isRight ? "" : `${at + 12}px`;
    this.tip.style.right = isRight ? `${this.#width - at + 12}px` : "";
    const dots = this.series.map((each, index) =>
      stacks[nearest][index] === null ? null : s("circle", { class: `dot ${each.class}`, cx: at, cy: y(stacks[nearest][index]), r: 3.5 }),
    );
    return [s("line", { class: "cursor", x1: at, x2: at, y1: TOP, y2: this.height - BOTTOM }), dots];
  }
}

// Two parts of a whole as a bar: allowed and denied, for example.
export function splitBar(parts, whole) {
  const bar = h("span", { class: "split", "aria-hidden": "true" });
  for (const [kind, value] of parts) {
    const piece = h("span", { class: kind });
    piece.style.width = `${whole > 0 ? (100 * value) / whole : 0}%`;
    bar.append(piece);
  }
  return bar;
}
