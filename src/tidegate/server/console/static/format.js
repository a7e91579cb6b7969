// Numbers and times as text.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (value) => (value === null || value === undefined ? "–" : value < 100000 ? whole.format(value) : short.format(value));

export function rate(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value < 0.1) return "<0.1";
  if (value < 10) return String(Number(value.toFixed(1)));
  return value < 100000 ? whole.format(value) : short.format(value);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value < 0.001) return `${Number((value * 1e6).toPrecision(2))} µs`;
  if (value < 1) return `${Number((value * 1000).toPrecision(2))} ms`;
  return `${Number(value.toPrecision(3))} s`;
}

const UNITS = [
  [86400000, "day", "d"],
  [3600000, "hour", "h"],
  [60000, "minute", "min"],
  [1000, "second", "s"],
];

// 18 s, 12 min, 2 h 5 min
export function duration(milliseconds) {
  if (milliseconds === null || milliseconds === undefined) return "–";
  if (milliseconds < 1000) return `${Math.round(milliseconds)} ms`;
  let left = Math.ceil(milliseconds / 1000);
  const parts = [];
  for (const [unit, , abbreviation] of UNITS) {
    const times = Math.floor(left / (unit / 1000));
    left -= times * (unit / 1000);
    if (times > 0) parts.push(`${times} ${abbreviation}`);
    else if (parts.length > 0) break;
    if (parts.length === 2) break;
  }
  return parts.join(" ");
}

// 100 per minute
export function rule(quota, durationMs) {
  for (const [unit, word] of UNITS) {
    if (durationMs % unit === 0) {
      const times = durationMs / unit;
      return times === 1 ? `${count(quota)} per ${word}` : `${count(quota)} per ${times} ${word}s`;
    }
  }
  return `${count(quota)} per ${durationMs / 1000} seconds`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let index = 0;
  while (value >= 1000 && index < units.length - 1) {
    value /= 1000;
    index += 1;
  }
  return `${value < 10 && index > 0 ? value.toFixed(1) : Math.round(value)} ${units[index]}`;
}

// In UTC, as in the log of the server and in its explanations.
export const clock = (milliseconds) => `${new Date(milliseconds).toISOString().slice(11, 19)} UTC`;

// A row from another program may hold a time that no date can name: toISOString would throw, and the list stay empty.
export const moment = (milliseconds) =>
  milliseconds === null || milliseconds === undefined ? "–" : new Date(Math.min(Math.max(milliseconds, 0), 253402300799999)).toISOString().slice(0, 16).replace("T", " ") + " UTC";

export const share = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(part / whole < 0.1 ? 1 : 0)} %` : "–");
