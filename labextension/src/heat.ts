/**
 * Many ranks as a map: a cell for each, filled to its level, grouped by node.
 */

import { sentence } from "./row";
import { remarks, type Metric, type Rank, type State } from "./state";
import { make, option, write } from "./words";

const METRICS: [metric: Metric, words: string][] = [
  ["memory", "memory in use"],
  ["utilization", "utilization"],
  ["temperature", "temperature, of 100 °C"],
  ["step", "step, of the slowest"],
];

/** The menu of what a map can show. */
export function metricMenu(onChange: (metric: Metric) => void): HTMLSelectElement {
  const menu = make("select", "select");
  menu.append(...METRICS.map(([metric, words]) => option(metric, words)));
  menu.setAttribute("aria-label", "What the map shows");
  menu.addEventListener("change", () => {
    onChange(menu.value as Metric);
  });
  return menu;
}

/** A cell; `element` is in the page. */
export class Cell {
  readonly element = make("div", "cell");
  private readonly fill = make("i", "fill");
  private readonly name = make("span", "");

  constructor() {
    this.element.append(this.fill, this.name);
    this.element.setAttribute("role", "option");
    this.element.tabIndex = -1;
  }

  draw(rank: Rank, state: State, metric: Metric, index: number): void {
    const level = rank.state === "dead" ? null : state.level(metric, index);
    const height = level === null ? "0" : `${(level * 100).toFixed(0)}%`;
    if (this.fill.style.height !== height) this.fill.style.height = height;
    write(this.name, rank.state === "dead" ? "✕" : rank.name);
    const mark = remarks(rank)[0]?.[0];
    if (mark === undefined) delete this.element.dataset["level"];
    else this.element.dataset["level"] = mark;
    this.element.dataset["state"] = rank.state;
    const words = sentence(rank);
    if (this.element.title === words) return;
    this.element.title = words;
    this.element.setAttribute("aria-label", words);
  }
}
