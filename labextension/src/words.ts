/**
 * Numbers in words, with their units, and the little DOM that all parts of the view share.
 */

import type { Rank } from "./state";

/** MiB for people: "61.2 GiB". */
export function size(mebibytes: number | null): string {
  if (mebibytes === null) return "n/a";
  if (mebibytes === 0) return "0 B";
  const [scale, unit] = scaled(mebibytes);
  return `${figures(mebibytes / scale)} ${unit}`;
}

/** A part of something, both in MiB: "61.2 of 79.6 GiB", "298 MiB of 24.0 GiB". */
export function partOf(part: number | null, whole: number | null): string {
  if (part === null) return "n/a";
  const [scale, unit] = scaled(part);
  if (whole === null) return `${size(part)} of n/a`;
  const own = scaled(whole)[1] === unit ? "" : ` ${unit}`;
  return `${figures(part / scale)}${own} of ${size(whole)}`;
}

export function percent(value: number | null): string {
  return value === null ? "n/a" : `${value.toFixed(0)} %`;
}

export function degrees(value: number | null): string {
  return value === null ? "n/a" : `${value.toFixed(0)} °C`;
}

export function watts(value: number | null): string {
  return value === null ? "n/a" : `${value.toFixed(0)} W`;
}

export function milliseconds(value: number | null): string {
  if (value === null) return "n/a";
  return value < 1000 ? `${value.toPrecision(3)} ms` : `${(value / 1000).toFixed(2)} s`;
}

/** TFLOPS for people: "412 TFLOPS", "11.5 GFLOPS". */
export function speed(value: number | null): string {
  if (value === null) return "n/a";
  const [scale, unit] = value >= 1 ? [1, "TFLOPS"] : [1e-3, "GFLOPS"];
  return `${value / scale >= 10 ? figures(value / scale) : (value / scale).toPrecision(3)} ${unit}`;
}

/** "rank 3", or what else it is. */
export function nameOf(rank: Rank): string {
  return rank.rank < 0 ? rank.name : `rank ${rank.name}`;
}

const MARKS: Record<string, string> = { busy: "●", idle: "○", stuck: "◐", dead: "✕" };

export function stateOf(rank: Rank): string {
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

function scaled(mebibytes: number): [scale: number, unit: string] {
  if (mebibytes >= 1024 ** 2) return [1024 ** 2, "TiB"];
  if (mebibytes >= 1024) return [1024, "GiB"];
  return mebibytes >= 1 ? [1, "MiB"] : [1 / 1024, "KiB"];
}

function figures(value: number): string {
  return value.toLocaleString("en", {
    maximumFractionDigits: value >= 100 ? 0 : 1,
    minimumFractionDigits: value >= 100 ? 0 : 1,
  });
}
