/**
 * Many ranks as a map: a cell for each, colored by how far it is from the median, grouped by node.
 */

import type { Metric, RankRow } from "./generated/wire";
import { sentence } from "./row";
import { remarks, type State } from "./state";
import * as strings from "./strings";
import { make, option, write } from "./words";

/** From the median, where a color is strongest: shares of what the map's levels are shares of. */
const FAR: Record<Metric, number> = { memory: 0.25, utilization: 0.25, temperature: 0.15, step: 0.2 };
const SHADES = 8; // that the eye tells apart, on each side

/** The menu of what a map can show. */
export function metricMenu(onChange: (metric: Metric) => void): HTMLSelectElement {
  const menu = make("select", "select");
  menu.append(...Object.entries(strings.metrics).map(([metric, { name }]) => option(metric, name)));
  menu.setAttribute("aria-label", strings.whatTheMapShows);
  menu.addEventListener("change", () => {
    onChange(menu.value as Metric);
  });
  return menu;
}

/** What the map's colors mean. */
export function scale(metric: Metric): HTMLElement[] {
  const { less, more } = strings.metrics[metric];
  const colors = make("i", "scale");
  colors.title = strings.median;
  return [
    make("span", "key", less, colors, more),
    make("span", "key", strings.dead),
    make("span", "key", strings.marked),
  ];
}

/** How far a rank is from the median of all: -1 to 1, 0 where it is not known. */
export function deviation(state: State, metric: Metric, index: number): number {
  const level = state.level(metric, index);
  const middle = state.median(metric);
  return level === null || middle === null ? 0 : Math.max(-1, Math.min(1, (level - middle) / FAR[metric]));
}

/** A cell; `element` is in the page. */
export class Cell {
  readonly element = make("div", "cell");
  private readonly name = make("span", "");
  private color = "";

  constructor() {
    this.element.append(this.name);
    this.element.setAttribute("role", "option");
    this.element.tabIndex = -1;
  }

  draw(rank: RankRow, state: State, metric: Metric, index: number): void {
    const known = rank.state !== "dead" && state.level(metric, index) !== null;
    this.paint(known ? Math.round(deviation(state, metric, index) * SHADES) : null);
    write(this.name, rank.state === "dead" ? "✕" : rank.name);
    const mark = remarks(rank, state.head.alert?.[1])[0]?.[0];
    if (mark === undefined) delete this.element.dataset["level"];
    else this.element.dataset["level"] = mark;
    this.element.dataset["state"] = rank.state;
    const words = sentence(rank);
    if (this.element.title === words) return;
    this.element.title = words;
    this.element.setAttribute("aria-label", words);
  }

  /** @param shade - Of -8 to 8; null: nothing is known. */
  private paint(shade: number | null): void {
    const side = (shade ?? 0) < 0 ? "--low" : "--high";
    const share = (100 * Math.abs(shade ?? 0)) / SHADES;
    const color = shade === null ? "" : `color-mix(in srgb, var(${side}) ${share}%, var(--even))`;
    if (color === this.color) return;
    this.color = color;
    this.element.style.background = color;
  }
}
