/**
 * What the kernel has told: the other end of nbdist/panel/updates.py. Independent of the page.
 */

import type { Point, Trend } from "./strip";

export type Level = "warn" | "bad";

/** One rank. Memory in MiB, shares in percent, time in milliseconds, speed in TFLOPS; null: not known. */
export interface Rank {
  rank: number;
  name: string;
  node: number;
  device: string;
  gpu: string;
  pid: number;
  total: number | null;
  allocated: number | null;
  cache: number | null;
  non_torch: number | null;
  process: number | null;
  others: number | null;
  kept: number | null;
  peak: number | null;
  utilization: number | null;
  temperature: number | null;
  power: number | null;
  power_limit: number | null;
  cpu: number | null;
  state: string;
  doing: string;
  step: number | null;
  work: number | null;
  flops: number | null;
  least: boolean;
  mfu: number | null;
  badges: [Level, string][];
  why: string;
}

/** One machine; MiB, percent, seconds between two looks. */
export interface Node {
  name: string;
  gpus: string;
  cpu: number | null;
  used: number | null;
  total: number | null;
  period: number | null;
  why: string;
}

/** One figure over all ranks, in words. */
export type Stat = [key: string, label: string, value: string, note: string, level: Level | "stale" | null, action: string];

/** Why ranks are stuck: in a sentence, what most of them do in the words of their rows, and for how many seconds. */
export type Alert = [words: string, doing: string, seconds: number | null];

export interface Head {
  title: string;
  live: "live" | "paused" | "ended";
  rate: number;
  alert: Alert | null;
  stats: Stat[];
}

export type Metric = "memory" | "utilization" | "temperature" | "step";

/** What is told of all ranks of a map at once, a character for each. */
type Layer = Metric | "state";

/** Everything, as a page gets it that opens. */
export interface Frame {
  id: string;
  columns: string[];
  node_columns: string[];
  heat: boolean;
  head: Head;
  ranks: unknown[][];
  nodes: unknown[][];
  levels: Partial<Record<Layer, string>>;
  history: (number | null)[][];
  trends: string[];
  trend: Point[];
}

type Delta = [index: number, columns: number, ...values: unknown[]];

/** What has changed of it; 0 stands for a figure that has not. */
export type HeadNews = Partial<Omit<Head, "stats">> & { stats?: (Stat | 0)[] };

/** What has changed. */
export interface Update {
  type: "update";
  head?: HeadNews;
  ranks?: Delta[];
  nodes?: Delta[];
  levels?: [layer: Layer, first: number, characters: string][];
  point?: Point;
}

const HISTORY = 60;
const TREND = 300;
const STATES: Record<string, string> = { b: "busy", d: "dead", i: "idle", s: "stuck" };
const LEVELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/** What has changed, though nothing was looked at. */
export interface HeadUpdate {
  type: "head";
  head: HeadNews;
}

/** The state that the view draws. */
export class State {
  heat = false;
  head: Head = { title: "", live: "live", rate: 1, alert: null, stats: [] };
  ranks: Rank[] = [];
  nodes: Node[] = [];
  history: (number | null)[][] = [];
  trend: Trend = { names: [], points: [] };
  /** Indices of ranks that have changed since the view has drawn them last; it clears this. */
  readonly touched = new Set<number>();
  private columns: string[] = [];
  private nodeColumns: string[] = [];
  private levels: Partial<Record<Layer, string>> = {};
  private medians: Partial<Record<Metric, number | null>> = {};

  /** Whether there is anything to draw. */
  get known(): boolean {
    return this.ranks.length > 0;
  }

  load(frame: Frame): void {
    this.columns = frame.columns;
    this.nodeColumns = frame.node_columns;
    this.heat = frame.heat;
    this.head = frame.head;
    this.ranks = frame.ranks.map((values) => named(frame.columns, values) as unknown as Rank);
    this.nodes = frame.nodes.map((values) => named(frame.node_columns, values) as unknown as Node);
    this.levels = { ...frame.levels };
    this.setStates(0, frame.levels.state ?? "");
    this.history = frame.history.map((values) => [...values]);
    this.trend = { names: frame.trends, points: [...frame.trend] };
    this.medians = {};
  }

  apply(update: Update): void {
    this.hear(update.head ?? {});
    change(this.nodes, this.nodeColumns, update.nodes ?? []);
    for (const [layer, first, characters] of update.levels ?? []) {
      const old = this.levels[layer] ?? "";
      for (let index = 0; index < characters.length; index++) this.touched.add(first + index);
      this.levels[layer] = old.slice(0, first) + characters + old.slice(first + characters.length);
      if (layer === "state") this.setStates(first, characters);
    }
    change(this.ranks, this.columns, update.ranks ?? []);
    for (const [index] of update.ranks ?? []) this.touched.add(index);
    if (update.levels !== undefined) this.medians = {};
    if (update.point !== undefined) this.trend = { ...this.trend, points: [...this.trend.points, update.point].slice(-TREND) };
    this.history.forEach((values, index) => {
      const rank = this.ranks[index];
      values.push(rank === undefined ? null : drawn(rank));
      values.splice(0, values.length - HISTORY);
    });
  }

  /** Take what has changed of the head. */
  hear(news: HeadNews): void {
    const before = this.head.stats;
    const stats = news.stats?.flatMap((stat, index) => (stat === 0 ? (before[index] === undefined ? [] : [before[index]]) : [stat]));
    this.head = { ...this.head, ...news, stats: stats ?? before };
  }

  private setStates(first: number, letters: string): void {
    for (let index = 0; index < letters.length; index++) {
      const rank = this.ranks[first + index];
      const state = STATES[letters[index] ?? ""];
      if (rank === undefined || state === undefined || state === rank.state) continue;
      rank.state = state;
      rank.doing = ""; // which was of the state before; the kernel tells it when its turn comes
    }
  }

  /** The level in the middle of those that are known; null: none is. */
  median(metric: Metric): number | null {
    const known = this.medians[metric];
    if (known !== undefined) return known;
    const levels = this.ranks.flatMap((rank, index) => (rank.state === "dead" ? [] : (this.level(metric, index) ?? [])));
    const middle = levels.sort((one, other) => one - other)[Math.floor(levels.length / 2)] ?? null;
    this.medians[metric] = middle;
    return middle;
  }

  /** What a heat map draws of a rank: 0 to 1, or null. */
  level(metric: Metric, index: number): number | null {
    const at = LEVELS.indexOf(this.levels[metric]?.[index] ?? ".");
    return at < 0 ? null : at / (LEVELS.length - 1);
  }
}

/** What a rank takes of its device's memory. */
export function held(rank: Rank): number | null {
  return rank.allocated === null ? rank.process : rank.allocated + (rank.cache ?? 0) + (rank.non_torch ?? 0);
}

/** What processes together take of it; on the CPU, where ranks share it, what the rank takes. */
export function shown(rank: Rank): number | null {
  const own = held(rank);
  return !onGpu(rank) || (own === null && rank.others === null) ? own : (own ?? 0) + (rank.others ?? 0);
}

export function onGpu(rank: Rank): boolean {
  return rank.cache !== null || rank.gpu !== "";
}

/** How much a rank deserves a look; 0: it does not. The one that has died comes before all that wait for it. */
export function urgency(rank: Rank): number {
  if (rank.state === "dead") return 4;
  if (rank.badges.some(([level]) => level === "bad")) return 3;
  if (rank.badges.length > 0) return 2;
  return rank.state === "stuck" ? 1 : 0;
}

/**
 * What is to be said of it, in the order of weight.
 *
 * @param known - What ranks do that is said of all of them elsewhere.
 */
export function remarks(rank: Rank, known = ""): [level: Level, words: string][] {
  const level = { dead: "bad", stuck: "warn" } as const;
  const state = rank.state === "dead" || rank.state === "stuck" ? level[rank.state] : null;
  return state === null || rank.doing === "" || rank.doing === known ? rank.badges : [[state, rank.doing], ...rank.badges];
}

function drawn(rank: Rank): number | null {
  return rank.gpu === "" ? held(rank) : rank.utilization;
}

function named(columns: string[], values: unknown[]): Record<string, unknown> {
  return Object.fromEntries(columns.map((column, index) => [column, values[index]]));
}

function change(rows: object[], columns: string[], deltas: Delta[]): void {
  for (const [index, bits, ...values] of deltas) {
    const names = columns.filter((_, column) => bits & (1 << column));
    Object.assign(rows[index] ?? {}, named(names, values));
  }
}
