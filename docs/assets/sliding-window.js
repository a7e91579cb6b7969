// The sliding window as a page to play with: docs/architecture/sliding-window.md. No library, no network.
// The arithmetic is that of src/tidegate/core/windows.py; tests/test_sliding_window_page.py compares the two.
"use strict";

const slidingWindow = (() => {
  // How much counts for a request at `nowMs`: this window, the covered share of the one before, and its cost.
  function effective(counts, durationMs, nowMs, cost) {
    const sequence = Math.floor(nowMs / durationMs);
    const elapsed = nowMs - sequence * durationMs;
    const previous = counts.get(sequence - 1) || 0;
    const carried = Math.floor((previous * (durationMs - elapsed)) / durationMs);
    return { sequence, elapsed, previous, current: counts.get(sequence) || 0, carried,
      total: (counts.get(sequence) || 0) + carried + cost };
  }

  // The shortest wait after which the cost fits if no other request comes; null if it never does.
  function retryAfterMs(counts, durationMs, nowMs, cost, quota) {
    if (cost > quota) return null;
    const fits = (wait) => effective(counts, durationMs, nowMs + wait, cost).total <= quota;
    let low = 0;
    let high = 2 * durationMs;
    while (low < high) {
      const middle = Math.floor((low + high) / 2);
      if (fits(middle)) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  return { effective, retryAfterMs };
})();

if (typeof module !== "undefined") module.exports = slidingWindow;

if (typeof document !== "undefined") {
  const start = () => {
    const root = document.getElementById("sliding-window");
    if (!root || root.dataset.ready) return;
    root.dataset.ready = "yes";
    root.replaceChildren();

    const DURATION = 60000;
    const SPAN = 4 * DURATION;
    // As wide as the page, so that the text keeps its size on a phone.
    const WIDE = Math.max(340, Math.min(720, root.clientWidth));
    const HIGH = 260;
    const LOW = 210;
    let quota = 100;
    let now = 0;
    let playing = false;
    let denied = 0;
    let counts = new Map();
    let requests = [];

    const make = (name, attributes, parent, text) => {
      const node = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
      if (text !== undefined) node.textContent = text;
      parent.append(node);
      return node;
    };
    const control = (label, click) => {
      const node = document.createElement("button");
      node.type = "button";
      node.textContent = label;
      node.className = "md-button";
      node.addEventListener("click", click);
      controls.append(node, " ");
      return node;
    };

    const svg = make("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, width: "100%", role: "img" }, root);
    const status = document.createElement("p");
    status.setAttribute("aria-live", "polite");
    root.append(status);
    const time = document.createElement("input");
    Object.assign(time, { type: "range", min: 0, max: SPAN - 1, step: 100, value: 0 });
    time.style.width = "100%";
    time.setAttribute("aria-label", "time");
    root.append(time);
    const controls = document.createElement("p");
    root.append(controls);

    const x = (ms) => (ms / SPAN) * WIDE;
    const height = () => (LOW - 40) / (quota * 1.25);

    function send(number) {
      for (let one = 0; one < number; one++) {
        const seen = slidingWindow.effective(counts, DURATION, now, 1);
        if (seen.total <= quota) {
          counts.set(seen.sequence, seen.current + 1);
          requests.push([now, true]);
        } else {
          denied += 1;
          requests.push([now, false]);
        }
      }
      draw();
    }

    function draw() {
      svg.replaceChildren();
      const soft = "var(--md-default-fg-color--light, #5b6770)";
      const strong = "var(--md-default-fg-color, #1f2933)";
      const accent = "var(--md-accent-fg-color, #0b7a75)";
      const seen = slidingWindow.effective(counts, DURATION, now, 1);
      for (let cell = 0; cell * DURATION < SPAN; cell++) {
        const count = counts.get(cell) || 0;
        const top = LOW - count * height();
        make("rect", { x: x(cell * DURATION), y: top, width: x(DURATION) - 2, height: LOW - top, fill: soft, opacity: 0.25 }, svg);
        make("text", { x: x((cell + 0.5) * DURATION), y: HIGH - 26, "text-anchor": "middle", fill: soft, "font-size": 13 }, svg,
          WIDE < 600 ? `min ${cell + 1}: ${count}` : `minute ${cell + 1}: ${count} allowed`);
      }
      const from = Math.max(0, now - DURATION);
      for (const [begin, end] of [[from, Math.min(now, seen.sequence * DURATION)], [seen.sequence * DURATION, now]]) {
        if (end <= begin) continue;
        const count = counts.get(Math.floor(begin / DURATION)) || 0;
        make("rect", { x: x(begin), y: LOW - count * height(), width: x(end) - x(begin), height: count * height(), fill: accent, opacity: 0.5 }, svg);
      }
      make("line", { x1: 0, x2: WIDE, y1: LOW - quota * height(), y2: LOW - quota * height(), stroke: strong, "stroke-dasharray": "3 4" }, svg);
      make("text", { x: WIDE - 4, y: LOW - quota * height() - 6, "text-anchor": "end", fill: strong, "font-size": 13 }, svg, `quota ${quota}`);
      make("line", { x1: x(now), x2: x(now), y1: 10, y2: LOW + 8, stroke: accent, "stroke-width": 2 }, svg);
      make("line", { x1: x(from), x2: x(now), y1: LOW + 12, y2: LOW + 12, stroke: accent, "stroke-width": 4 }, svg);
      make("line", { x1: 0, x2: WIDE, y1: LOW, y2: LOW, stroke: soft }, svg);
      for (const [at, fits] of requests.slice(-400)) {
        make("circle", { cx: x(at), cy: HIGH - 10, r: 2.5, fill: fits ? accent : "#c2410c" }, svg);
      }
      const wait = slidingWindow.retryAfterMs(counts, DURATION, now, 1, quota);
      const seconds = (now / 1000).toFixed(1);
      const sum = `${seen.current} + ${seen.previous} × ${((DURATION - seen.elapsed) / 1000).toFixed(1)} / 60 + 1 = ${seen.total}`;
      status.textContent = `At ${seconds} s the next request counts ${sum}: ` +
        (wait === 0 ? `allowed, ${quota - seen.total} more would fit.` : `denied, retry after ${wait < 1000 ? `${wait} ms` : `${(wait / 1000).toFixed(1)} s`}.`) +
        (denied ? ` ${denied} denied so far.` : "");
      time.value = now;
    }

    time.addEventListener("input", () => {
      now = Number(time.value);
      // Going back undoes what comes later: a cell never shrinks in the limiter.
      requests = requests.filter(([at]) => at <= now);
      counts = new Map();
      denied = 0;
      for (const [at, fits] of requests) {
        const cell = Math.floor(at / DURATION);
        if (fits) counts.set(cell, (counts.get(cell) || 0) + 1);
        else denied += 1;
      }
      draw();
    });
    control("Send 1", () => send(1));
    control("Send 10", () => send(10));
    control("Send 100", () => send(100));
    const play = control("Play, 3 requests/s", () => {
      playing = !playing;
      play.textContent = playing ? "Pause" : "Play, 3 requests/s";
      if (playing) requestAnimationFrame(step);
    });
    control("The worst case", () => {
      counts = new Map();
      requests = [];
      denied = 0;
      now = DURATION - 10;
      send(100);
      now = Math.floor(1.5 * DURATION);
      send(100);
    });
    control("Clear", () => {
      counts = new Map();
      requests = [];
      denied = 0;
      now = 0;
      draw();
    });

    let last = 0;
    let due = 0;
    function step(at) {
      if (!playing) {
        last = 0;
        return;
      }
      // Ten times as fast as real time.
      const passed = last ? Math.min(100, at - last) * 10 : 0;
      last = at;
      now = Math.min(SPAN - 1, now + passed);
      due += (passed / 1000) * 3;
      const whole = Math.floor(due);
      due -= whole;
      send(whole);
      if (now >= SPAN - 1) {
        playing = false;
        last = 0;
        play.textContent = "Play, 3 requests/s";
      } else {
        requestAnimationFrame(step);
      }
    }
    // The example of the page: 80 in the first minute, 30 in the second, 15 s into it.
    now = DURATION / 2;
    send(80);
    now = DURATION + 10000;
    send(30);
    now = DURATION + 15000;
    draw();
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
}
