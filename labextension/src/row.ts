/**
 * One rank as a row: its memory as a stacked bar, how busy and warm it is, and what deserves a look.
 */

import { held, onGpu, remarks, shown, type Rank } from "./state";
import { badgeOf, degrees, make, milliseconds, nameOf, partOf, percent, size, stateOf, watts, write } from "./words";

export const PARTS = [
  ["allocated", "tensors"],
  ["cache", "torch's cache"],
  ["non_torch", "CUDA and NCCL"],
  ["others", "other processes"],
] as const;

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 64;
const HEIGHT = 18;

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
  private readonly state = make("span", "state");
  private readonly badges = make("span", "badges");

  constructor() {
    const gauges = [this.utilization, this.temperature, this.power];
    this.element.append(this.name, this.device, this.bar.element, this.memory, this.spark.element);
    this.element.append(...gauges, this.state, this.badges);
    this.element.setAttribute("role", "option");
    this.element.tabIndex = -1;
  }

  draw(rank: Rank, history: (number | null)[] | undefined): void {
    write(this.name, rank.name);
    write(this.device, rank.device);
    this.bar.draw(rank);
    write(this.memory, partOf(shown(rank), rank.total));
    this.spark.draw(history ?? [], onGpu(rank) ? 100 : null);
    write(this.utilization, percent(rank.utilization));
    write(this.temperature, degrees(rank.temperature));
    write(this.power, watts(rank.power));
    write(this.state, stateOf(rank));
    this.state.dataset["state"] = rank.state;
    this.drawBadges(rank);
    this.element.title = rank.why;
    this.element.setAttribute("aria-label", sentence(rank));
  }

  private drawBadges(rank: Rank): void {
    const found = remarks(rank);
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
  const words: [area: string, words: string][] = [
    ["name", "rank"],
    ["device", "device"],
    ["bar", gpus ? "memory of the device" : "memory of the machine"],
    ["memory", gpus ? "used / total" : "rank / machine"],
    ["spark-title", gpus ? "utilization" : "rank's memory"],
    ["gauge nbdist-utilization", "util"],
    ["gauge nbdist-temperature", "temp"],
    ["gauge nbdist-power", "power"],
    ["state", "state"],
  ];
  const element = make("div", "headings", ...words.map(([area, text]) => make("span", area.replace("bar", "bar-title"), text)));
  element.setAttribute("aria-hidden", "true"); // each row says it in words
  return element;
}

/** A rank in one sentence, for who listens. */
export function sentence(rank: Rank): string {
  const parts = [`${nameOf(rank)} on ${rank.device}`, rank.state, `memory ${partOf(shown(rank), rank.total)}`];
  if (rank.utilization !== null) parts.push(`utilization ${percent(rank.utilization)}`);
  if (rank.temperature !== null) parts.push(degrees(rank.temperature));
  if (rank.step !== null) parts.push(`step ${milliseconds(rank.step)}`);
  parts.push(...remarks(rank).map(([, text]) => text));
  return parts.join(", ");
}

/** The device's memory: who has how much of it, and the peak as a tick. */
class Bar {
  readonly element = make("span", "bar");
  private readonly parts = PARTS.map(([part]) => make("i", `part nbdist-${part}`));
  private readonly peak = make("b", "peak");

  constructor() {
    this.element.append(...this.parts, this.peak);
    this.element.setAttribute("aria-hidden", "true");
  }

  draw(rank: Rank): void {
    const total = rank.total;
    this.element.classList.toggle("nbdist-unknown", total === null || held(rank) === null);
    const words: string[] = [];
    PARTS.forEach(([part, name], index) => {
      const value = rank[part];
      const element = this.parts[index];
      if (element !== undefined) element.style.width = `${share(value, total).toFixed(2)}%`;
      if (value !== null) words.push(`${onGpu(rank) ? gpuName(rank, part, name) : cpuName(part)} ${size(value)}`);
    });
    this.peak.hidden = rank.peak === null || total === null;
    this.peak.style.left = `${share(rank.peak, total).toFixed(2)}%`;
    if (rank.peak !== null) words.push(`peak ${size(rank.peak)}`);
    this.element.title = words.join("\n");
  }
}

/** What a part of a GPU's bar is called: where the driver hides processes, the rest is not only others'. */
export function gpuName(rank: Rank, part: string, name: string): string {
  return part === "others" && rank.non_torch === null ? "outside torch" : name;
}

/** What the parts of a bar are called where there is no GPU. */
export function cpuName(part: string): string {
  return part === "allocated" ? "this rank's own" : "everything else in use";
}

/** The last minute or so. */
class Sparkline {
  readonly element = document.createElementNS(SVG, "svg");
  private readonly line = document.createElementNS(SVG, "polyline");
  private readonly area = document.createElementNS(SVG, "polygon");

  constructor() {
    this.element.setAttribute("class", "nbdist-spark");
    this.element.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.element.setAttribute("aria-hidden", "true");
    this.element.append(this.area, this.line);
  }

  /** @param most - The top of the scale; null: the largest value, so that a small change looks small. */
  draw(values: (number | null)[], most: number | null): void {
    const known = values.filter((value) => value !== null);
    const top = most ?? Math.max(...known);
    const bottom = most === null ? Math.min(...known, top * 0.5) : 0;
    const step = WIDTH / 59;
    const points = values.flatMap((value, index) => {
      if (value === null || top <= bottom) return [];
      const x = WIDTH - (values.length - 1 - index) * step;
      const y = HEIGHT - 1 - ((value - bottom) / (top - bottom)) * (HEIGHT - 2);
      return [[x.toFixed(1), y.toFixed(1)] as const];
    });
    const line = points.map((point) => point.join()).join(" ");
    const [first, last] = [points[0], points.at(-1)];
    this.line.setAttribute("points", line);
    this.area.setAttribute("points", first && last ? `${first[0]},${HEIGHT} ${line} ${last[0]},${HEIGHT}` : "");
  }
}

function share(part: number | null, whole: number | null): number {
  return part === null || whole === null || whole <= 0 ? 0 : Math.min(100, (100 * part) / whole);
}
