/**
 * One rank as a row: its memory as a stacked bar, how busy and warm it is, and what deserves a look.
 */

import type { RankRow } from "./generated/wire";
import { held, onGpu, remarks, shown } from "./state";
import * as strings from "./strings";
import { badgeOf, degrees, make, milliseconds, nameOf, partOf, percent, size, stateOf, svg, watts, write } from "./words";

export const PARTS = ["allocated", "cache", "non_torch", "process", "others", "kept"] as const;
export type Part = (typeof PARTS)[number];

const WIDTH = 64;
const HEIGHT = 18;

/** What a row is drawn beside. */
export interface Beside {
  /** The largest memory of a rank, MiB: where ranks share a machine, bars are parts of it. */
  largest: number;
  /** What ranks do that is said of all of them elsewhere. */
  known: string;
}

/** A row; `element` is in the page. */
export class Row {
  readonly element = make("div", "row");
  private readonly name = make("span", "name");
  private readonly device = make("span", "device");
  private readonly bar = new Bar();
  private readonly memory = make("span", "memory");
  private readonly spark = new Sparkline();
  private readonly utilization = make("span", "gauge nbdist-utilization");
  private readonly temperature = make("span", "gauge nbdist-temperature");
  private readonly power = make("span", "gauge nbdist-power");
  private readonly cpu = make("span", "gauge nbdist-cores");
  private readonly state = make("span", "state");
  private readonly badges = make("span", "badges");

  constructor() {
    const gauges = [this.utilization, this.temperature, this.power, this.cpu];
    this.element.append(this.name, this.device, this.bar.element, this.memory, this.spark.element);
    this.element.append(...gauges, this.state, this.badges);
    this.element.setAttribute("role", "option");
    this.element.tabIndex = -1;
  }

  draw(rank: RankRow, history: (number | null)[] | undefined, { largest, known }: Beside): void {
    write(this.name, rank.name);
    write(this.device, rank.device);
    if (onGpu(rank)) this.bar.draw(rank);
    else this.bar.drawOwn(rank, largest);
    write(this.memory, onGpu(rank) ? partOf(shown(rank), rank.total) : size(held(rank)));
    this.spark.draw(history ?? [], onGpu(rank) ? 100 : null);
    write(this.utilization, percent(rank.utilization));
    write(this.temperature, degrees(rank.temperature));
    write(this.power, watts(rank.power));
    write(this.cpu, percent(rank.cpu));
    write(this.state, stateOf(rank));
    this.state.dataset["state"] = rank.state;
    this.drawBadges(rank, known);
    this.element.title = rank.why;
    this.element.setAttribute("aria-label", sentence(rank));
  }

  private drawBadges(rank: RankRow, known: string): void {
    const found = remarks(rank, known);
    const words = JSON.stringify(found);
    if (this.badges.dataset["words"] === words) return;
    this.badges.dataset["words"] = words;
    this.badges.replaceChildren(
      ...found.map(([level, text]) => {
        const badge = make("span", "badge", badgeOf(text));
        badge.dataset["level"] = level;
        return badge;
      }),
    );
  }
}

/** What the columns of rows are. */
export function headings(gpus: boolean): HTMLElement {
  const { headings } = strings;
  const words: [area: string, words: string][] = [
    ["name", headings.rank],
    ["device", headings.device],
    ["bar-title", gpus ? headings.memoryOfDevice : headings.memoryOfRank],
    ["memory", gpus ? headings.usedOfTotal : headings.memory],
    ["spark-title", gpus ? headings.utilizationLately : headings.memoryLately],
    ["gauge nbdist-utilization", headings.utilization],
    ["gauge nbdist-temperature", headings.temperature],
    ["gauge nbdist-power", headings.power],
    ["gauge nbdist-cores", headings.cpu],
    ["state", headings.state],
  ];
  const element = make("div", "headings", ...words.map(([area, text]) => make("span", area, text)));
  element.setAttribute("aria-hidden", "true"); // each row says it in words
  return element;
}

/** A rank in one sentence, for who listens. */
export function sentence(rank: RankRow): string {
  const { spoken } = strings;
  const parts = [strings.rankOn(nameOf(rank), rank.device), rank.state, spoken.memory(partOf(shown(rank), rank.total))];
  if (rank.utilization !== null) parts.push(spoken.utilization(percent(rank.utilization)));
  if (rank.temperature !== null) parts.push(degrees(rank.temperature));
  if (rank.cpu !== null) parts.push(spoken.cpu(percent(rank.cpu)));
  if (rank.step !== null) parts.push(spoken.step(milliseconds(rank.step)));
  parts.push(...remarks(rank).map(([, text]) => text));
  return parts.join(", ");
}

/** The device's memory: who has how much of it, and the peak as a tick. */
class Bar {
  readonly element = make("span", "bar");
  private readonly parts = PARTS.map((part) => make("i", `part nbdist-${part}`));
  private readonly peak = make("b", "peak");

  constructor() {
    this.element.append(...this.parts, this.peak);
    this.element.setAttribute("aria-hidden", "true");
  }

  draw(rank: RankRow): void {
    const total = rank.total;
    this.element.classList.toggle("nbdist-unknown", total === null || shown(rank) === null);
    const words: string[] = [];
    PARTS.forEach((part, index) => {
      const value = rank[part];
      this.widen(index, share(value, total));
      if (value !== null) words.push(`${partName(rank, part)} ${size(value)}`);
    });
    this.peak.hidden = rank.peak === null || total === null;
    this.peak.style.left = `${share(rank.peak, total).toFixed(2)}%`;
    if (rank.peak !== null) words.push(strings.spoken.peak(size(rank.peak)));
    this.element.title = words.join("\n");
  }

  /** A rank that shares its machine: the machine's bar has all of them, this one what is its own. */
  drawOwn(rank: RankRow, largest: number): void {
    const own = held(rank);
    this.element.classList.toggle("nbdist-unknown", own === null);
    PARTS.forEach((_, index) => {
      this.widen(index, index === 0 ? share(own, largest) : 0);
    });
    this.peak.hidden = true;
    this.element.title = partOf(own, rank.total);
  }

  private widen(index: number, percent: number): void {
    const element = this.parts[index];
    if (element !== undefined) element.style.width = `${percent.toFixed(2)}%`;
  }
}

/** A machine's memory: a segment for each of its ranks, and everything else in use. */
export class MachineBar {
  readonly element = make("span", "bar nbdist-machine");
  private segments: HTMLElement[] = [];

  constructor() {
    this.element.setAttribute("aria-hidden", "true");
  }

  draw(ranks: RankRow[], used: number | null, total: number | null): void {
    if (this.segments.length !== ranks.length + 1) {
      this.segments = [...ranks.map(() => make("i", "part nbdist-segment")), make("i", "part nbdist-others")];
      this.element.replaceChildren(...this.segments);
    }
    const own = ranks.map(held);
    const others = used === null ? null : Math.max(0, used - own.reduce<number>((sum, each) => sum + (each ?? 0), 0));
    [...own, others].forEach((value, index) => {
      const segment = this.segments[index];
      const rank = ranks[index];
      if (segment === undefined) return;
      segment.style.width = `${share(value, total).toFixed(2)}%`;
      segment.title = `${rank === undefined ? strings.elseInUse : nameOf(rank)} ${size(value)}`;
    });
  }
}

/** What a part of a bar is called: where the driver hides processes, the rest is not only others'. */
export function partName(rank: RankRow, part: Part): string {
  return part === "others" && rank.non_torch === null && rank.process === null ? strings.outsideTorch : strings.parts[part];
}

/** The last minute or so. */
class Sparkline {
  readonly element = svg("svg");
  private readonly line = svg("polyline");
  private readonly area = svg("polygon");
  private readonly title = svg("title");

  constructor() {
    this.element.setAttribute("class", "nbdist-spark");
    this.element.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.element.setAttribute("aria-hidden", "true");
    this.element.append(this.title, this.area, this.line);
  }

  /** @param most - The top of the scale of percents; null: of MiB, the largest, so that a small change looks small. */
  draw(values: (number | null)[], most: number | null): void {
    const known = values.filter((value) => value !== null);
    const top = most ?? Math.max(...known);
    const step = WIDTH / 59;
    const points = values.flatMap((value, index) => {
      if (value === null || top <= 0) return [];
      const x = WIDTH - (values.length - 1 - index) * step;
      const y = HEIGHT - 1 - (value / top) * (HEIGHT - 2);
      return [[x.toFixed(1), y.toFixed(1)] as const];
    });
    const line = points.map((point) => point.join()).join(" ");
    const [first, last] = [points[0], points.at(-1)];
    this.line.setAttribute("points", line);
    this.area.setAttribute("points", first && last ? `${first[0]},${HEIGHT} ${line} ${last[0]},${HEIGHT}` : "");
    const write = most === null ? size : percent;
    this.title.textContent = known.length > 0 ? `${write(known[0] ?? null)} … ${write(known.at(-1) ?? null)}` : "";
  }
}

function share(part: number | null, whole: number | null): number {
  return part === null || whole === null || whole <= 0 ? 0 : Math.min(100, (100 * part) / whole);
}
