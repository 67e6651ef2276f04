/**
 * What the kernel has told: the other end of nbdist/panel/updates.py. Independent of the page.
 */

import {
  HISTORY,
  LEVELS,
  TREND_POINTS,
  type HeadNews,
  type Level,
  type MapLevels,
  type Metric,
  type NodeRow,
  type PanelFrame,
  type PanelHead,
  type PanelUpdate,
  type RankRow,
  type RowDelta,
} from "./generated/wire";
import type { Trend } from "./strip";

const STATES: Record<string, string> = { b: "busy", d: "dead", i: "idle", s: "stuck" };

/** The state that the view draws. */
export class State {
  heat = false;
  head: PanelHead = { title: "", live: "live", rate: 1, alert: null, stats: [] };
  ranks: RankRow[] = [];
  nodes: NodeRow[] = [];
  history: (number | null)[][] = [];
  trend: Trend = { names: [], points: [] };
  /** Indices of ranks that have changed since the view has drawn them last; it clears this. */
  readonly touched = new Set<number>();
  private columns: string[] = [];
  private nodeColumns: string[] = [];
  private levels: MapLevels = {};
  private medians: Partial<Record<Metric, number | null>> = {};

  /** Whether there is anything to draw. */
  get known(): boolean {
    return this.ranks.length > 0;
  }

  load(frame: PanelFrame): void {
    this.columns = frame.columns;
    this.nodeColumns = frame.node_columns;
    this.heat = frame.heat;
    this.head = frame.head;
    this.ranks = frame.ranks.map((values) => named(frame.columns, values) as unknown as RankRow);
    this.nodes = frame.nodes.map((values) => named(frame.node_columns, values) as unknown as NodeRow);
    this.levels = { ...frame.levels };
    this.setStates(0, frame.levels.state ?? "");
    this.history = frame.history.map((values) => [...values]);
    this.trend = { names: frame.trends, points: [...frame.trend] };
    this.medians = {};
  }

  apply(update: PanelUpdate): void {
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
    if (update.point !== undefined) this.trend = { ...this.trend, points: [...this.trend.points, update.point].slice(-TREND_POINTS) };
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
export function held(rank: RankRow): number | null {
  return rank.allocated === null ? rank.process : rank.allocated + (rank.cache ?? 0) + (rank.non_torch ?? 0);
}

/** What processes together take of it; on the CPU, where ranks share it, what the rank takes. */
export function shown(rank: RankRow): number | null {
  const own = held(rank);
  return !onGpu(rank) || (own === null && rank.others === null) ? own : (own ?? 0) + (rank.others ?? 0);
}

export function onGpu(rank: RankRow): boolean {
  return rank.cache !== null || rank.gpu !== "";
}

/** How much a rank deserves a look; 0: it does not. The one that has died comes before all that wait for it. */
export function urgency(rank: RankRow): number {
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
export function remarks(rank: RankRow, known = ""): [level: Level, words: string][] {
  const level = { dead: "bad", stuck: "warn" } as const;
  const state = rank.state === "dead" || rank.state === "stuck" ? level[rank.state] : null;
  return state === null || rank.doing === "" || rank.doing === known ? rank.badges : [[state, rank.doing], ...rank.badges];
}

function drawn(rank: RankRow): number | null {
  return rank.gpu === "" ? held(rank) : rank.utilization;
}

function named(columns: string[], values: unknown[]): Record<string, unknown> {
  return Object.fromEntries(columns.map((column, index) => [column, values[index]]));
}

function change(rows: object[], columns: string[], deltas: RowDelta[]): void {
  for (const [index, bits, ...values] of deltas) {
    const names = columns.filter((_, column) => bits & (1 << column));
    Object.assign(rows[index] ?? {}, named(names, values));
  }
}
