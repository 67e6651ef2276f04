/**
 * How a figure went: an area over the last ten minutes, with the cells that ran as bands.
 */

import type { Point } from "./generated/wire";
import * as strings from "./strings";
import { svg } from "./words";

/** Points of several figures, and what these are. */
export interface Trend {
  names: string[];
  points: Point[];
}

const WIDTH = 120;
const HEIGHT = 40;
const LONGEST = 600; // seconds that are shown
const SHORTEST = 60; // so that a short curve looks short
const GAP = 10; // seconds without a look, over which no line is drawn

/** The strip; `element` is in the page. */
export class Strip {
  readonly element = svg("svg");
  private readonly bands = svg("g");
  private readonly area = svg("path");
  private readonly line = svg("path");
  private readonly title = svg("title");
  private drawn: Point | undefined;

  constructor() {
    this.element.setAttribute("class", "nbdist-strip");
    this.element.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.element.setAttribute("preserveAspectRatio", "none");
    this.element.setAttribute("aria-hidden", "true");
    this.bands.setAttribute("class", "nbdist-bands");
    this.area.setAttribute("class", "nbdist-area");
    this.line.setAttribute("class", "nbdist-line");
    this.element.append(this.title, this.bands, this.area, this.line);
  }

  draw({ names, points }: Trend, name: string, label: string): void {
    const last = points.at(-1);
    const column = names.indexOf(name);
    if (last === undefined || column < 0 || last === this.drawn) return;
    this.drawn = last;
    this.title.textContent = strings.overTime(label);
    const seen = points.filter(([at]) => at > last[0] - LONGEST);
    const span = Math.max(SHORTEST, last[0] - (seen[0]?.[0] ?? 0));
    const x = (at: number): number => WIDTH - ((last[0] - at) / span) * WIDTH;
    const values = seen.map(([, , ...figures]) => figures[column] ?? null);
    const top = Math.max(...values.filter((value) => value !== null)) * 1.15;
    const runs = top > 0 ? stretches(seen, values).map((run) => run.map(([at, value]) => [x(at), HEIGHT * (1 - value / top)])) : [];
    const lines = runs.map((run) => `M${run.map((point) => point.map((each) => each.toFixed(1)).join(" ")).join("L")}`);
    this.line.setAttribute("d", lines.join(""));
    const closed = lines.map((line, index) => `${line}V${HEIGHT}H${runs[index]?.[0]?.[0]?.toFixed(1) ?? 0}Z`);
    this.area.setAttribute("d", closed.join(""));
    this.bands.replaceChildren(...cells(seen).map(([from, to]) => band(x(from), x(to))));
  }
}

/** Parts of a curve without a gap: when, and the value. */
export function stretches(points: Point[], values: (number | null)[]): [at: number, value: number][][] {
  const found: [number, number][][] = [];
  let before = -Infinity;
  points.forEach(([at], index) => {
    const value = values[index] ?? null;
    if (value === null) {
      before = -Infinity;
      return;
    }
    if (at - before > GAP || at < before) found.push([]);
    found.at(-1)?.push([at, value]);
    before = at;
  });
  return found;
}

/** When each cell ran that was seen running. */
export function cells(points: Point[]): [from: number, to: number][] {
  const found: [cell: number, from: number, to: number][] = [];
  let before = 0;
  for (const [at, cell] of points) {
    const current = found.at(-1);
    if (cell !== 0 && cell === before && current !== undefined) current[2] = at;
    else if (cell !== 0) found.push([cell, at, at]);
    before = cell;
  }
  return found.map(([, from, to]) => [from, to]);
}

function band(from: number, to: number): SVGElement {
  const element = svg("rect");
  element.setAttribute("x", from.toFixed(1));
  element.setAttribute("width", Math.max(0.5, to - from - 0.7).toFixed(1)); // cells that follow each other are two
  element.setAttribute("height", HEIGHT.toString());
  return element;
}
