/**
 * Numbers as text with units, by the rules of nbdist/base/text.py, and the little DOM that all parts of the view share.
 *
 * Both are tested with tests/unit/figures.json.
 */

import type { RankRow } from "./generated/wire";

/** MiB for people: "61.2 GiB". */
export function size(mebibytes: number | null): string {
  if (mebibytes === null) return "n/a";
  const [value, unit] = scaled(mebibytes);
  return `${unit === "B" ? fixed(value, 0, false) : figures(value)} ${unit}`;
}

/** A part of something, both in MiB: "61.2 of 79.6 GiB", "298 MiB of 24.0 GiB". */
export function partOf(part: number | null, whole: number | null): string {
  if (part === null) return "n/a";
  if (whole === null) return `${size(part)} of n/a`;
  const [value, unit] = size(part).split(" ") as [string, string];
  return `${value}${scaled(whole)[1] === unit ? "" : ` ${unit}`} of ${size(whole)}`;
}

export function percent(value: number | null, digits = 0): string {
  return value === null ? "n/a" : `${fixed(value, digits, false)} %`;
}

export function degrees(value: number | null): string {
  return value === null ? "n/a" : `${value.toFixed(0)} °C`;
}

export function watts(value: number | null): string {
  return value === null ? "n/a" : `${value.toFixed(0)} W`;
}

/** Milliseconds for people: "35.0 ms", "2.31 s", "3 min 20 s". */
export function milliseconds(value: number | null): string {
  if (value === null) return "n/a";
  const seconds = value / 1000;
  if (seconds < 0.9995) return `${threeFigures(value)} ms`;
  if (seconds < 119.5) return `${fixed(seconds, 2, false)} s`;
  const whole = Math.round(seconds);
  return `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

/** How long something has lasted: "40 s", "3 min". */
export function age(seconds: number): string {
  if (seconds < 119.5) return `${seconds.toFixed(0)} s`;
  return seconds < 7170 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(0)} h`;
}

/** TFLOPS for people: "412 TFLOPS", "48.1 GFLOPS", "0.520 MFLOPS". */
export function speed(value: number | null): string {
  if (value === null) return "n/a";
  const [scale, unit] = RATES.find(([least]) => value >= least) ?? [1e-6, "MFLOPS"];
  const rate = value / scale;
  return `${rate >= 10 ? figures(rate) : threeFigures(rate)} ${unit}`;
}

/** "rank 3", or what else it is. */
export function nameOf(rank: RankRow): string {
  return rank.rank < 0 ? rank.name : `rank ${rank.name}`;
}

const MARKS: Record<string, string> = { busy: "●", idle: "○", stuck: "◐", dead: "✕" };

export function stateOf(rank: RankRow): string {
  return `${MARKS[rank.state] ?? "?"} ${rank.state}`;
}

export function badgeOf(words: string): string {
  return `⚠ ${words}`;
}

/** An element with a class of ours. */
export function make<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  name: string,
  ...children: (Element | string)[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  if (name !== "") element.className = `nbdist-${name}`;
  element.append(...children);
  return element;
}

/** An element of a drawing. */
export function svg<K extends keyof SVGElementTagNameMap>(tag: K): SVGElementTagNameMap[K] {
  return document.createElementNS("http://www.w3.org/2000/svg", tag);
}

/** Set a text, only if it differs: most of them don't, and a screen reader or a selection would notice. */
export function write(element: Element, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

export function option(value: string, text: string): HTMLOptionElement {
  const element = document.createElement("option");
  element.value = value;
  element.textContent = text;
  return element;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"] as const;
const RATES: [least: number, unit: string][] = [
  [1, "TFLOPS"],
  [1e-3, "GFLOPS"],
];

/** A size in the largest unit of which it has one. */
function scaled(mebibytes: number): [value: number, unit: string] {
  let value = mebibytes * 1024 ** 2;
  let power = 0;
  for (; value >= 1024 && power < UNITS.length - 1; power++) value /= 1024;
  return [value, UNITS[power] ?? "B"];
}

/** Three figures or more: "61.2", "1,007". */
function figures(value: number): string {
  return fixed(value, value >= 99.95 ? 0 : 1);
}

/** Always three figures, without an exponent: "152", "0.0123". */
function threeFigures(value: number): string {
  const rounded = Number(value.toPrecision(3));
  return rounded > 0 ? fixed(rounded, Math.max(0, 2 - Math.floor(Math.log10(rounded)))) : "0";
}

function fixed(value: number, digits: number, grouped = true): string {
  return value.toLocaleString("en", {
    maximumFractionDigits: digits,
    minimumFractionDigits: digits,
    useGrouping: grouped,
  });
}

/** The name of a figure as it fits into a narrow tile: "samples/s". */
export function shortName(name: string): string {
  return name.replace(/ per second$/, "/s");
}
