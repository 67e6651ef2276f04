/**
 * What the kernel has told: the other end of nbdist/panel/updates.py. Knows nothing of the page.
 */

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
  others: number | null;
  peak: number | null;
  utilization: number | null;
  temperature: number | null;
  power: number | null;
  power_limit: number | null;
  state: string;
  doing: string;
  step: number | null;
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
export type Stat = [label: string, value: string, note: string, level: Level | "stale" | null];

export interface Head {
  title: string;
  live: "live" | "paused" | "ended";
  rate: number;
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
}

type Delta = [index: number, columns: number, ...values: unknown[]];

/** What has changed. */
export interface Update {
  type: "update";
  head?: Head;
  ranks?: Delta[];
  nodes?: Delta[];
  levels?: [layer: Layer, first: number, characters: string][];
}

const HISTORY = 60;
const STATES: Record<string, string> = { b: "busy", d: "dead", i: "idle", s: "stuck" };
const LEVELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/** What has changed, though nothing was looked at. */
export interface HeadUpdate {
  type: "head";
  head: Head;
}

/** The state that the view draws. */
export class State {
  heat = false;
  head: Head = { title: "", live: "live", rate: 1, stats: [] };
  ranks: Rank[] = [];
  nodes: Node[] = [];
  history: (number | null)[][] = [];
  /** Indices of ranks that have changed since the view has drawn them last; it clears this. */
  readonly touched = new Set<number>();
  private columns: string[] = [];
  private nodeColumns: string[] = [];
  private levels: Partial<Record<Layer, string>> = {};

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
  }

  apply(update: Update): void {
    this.head = update.head ?? this.head;
    change(this.ranks, this.columns, update.ranks ?? []);
    for (const [index] of update.ranks ?? []) this.touched.add(index);
    change(this.nodes, this.nodeColumns, update.nodes ?? []);
    for (const [layer, first, characters] of update.levels ?? []) {
      const old = this.levels[layer] ?? "";
      for (let index = 0; index < characters.length; index++) this.touched.add(first + index);
      this.levels[layer] = old.slice(0, first) + characters + old.slice(first + characters.length);
      if (layer === "state") this.setStates(first, characters);
    }
    this.history.forEach((values, index) => {
      const rank = this.ranks[index];
      values.push(rank === undefined ? null : drawn(rank));
      values.splice(0, values.length - HISTORY);
    });
  }

  private setStates(first: number, letters: string): void {
    for (let index = 0; index < letters.length; index++) {
      const rank = this.ranks[first + index];
      if (rank !== undefined) rank.state = STATES[letters[index] ?? ""] ?? rank.state;
    }
  }

  /** What a heat map draws of a rank: 0 to 1, or null. */
  level(metric: Metric, index: number): number | null {
    const at = LEVELS.indexOf(this.levels[metric]?.[index] ?? ".");
    return at < 0 ? null : at / (LEVELS.length - 1);
  }
}

/** What a rank takes of its device's memory. */
export function held(rank: Rank): number | null {
  return rank.allocated === null ? null : rank.allocated + (rank.cache ?? 0) + (rank.non_torch ?? 0);
}

/** What everybody together takes of it; on the CPU, where ranks share it, what the rank takes. */
export function shown(rank: Rank): number | null {
  const own = held(rank);
  return own === null || !onGpu(rank) ? own : own + (rank.others ?? 0);
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

/** What is to be said of it, in the order of weight. */
export function remarks(rank: Rank): [level: Level, words: string][] {
  const level = { dead: "bad", stuck: "warn" } as const;
  const state = rank.state === "dead" || rank.state === "stuck" ? level[rank.state] : null;
  return state === null || rank.doing === "" ? rank.badges : [[state, rank.doing], ...rank.badges];
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
