/**
 * What kernels and Jupyter servers say to pages, and pages to them.
 *
 * Written by `scripts/check --fix` from the structs in nbdist/wire/pages: change those.
 */

export const PAGE_TARGET = "nbdist.page";
export const PAGE_PROTOCOL = 7;
export const PANEL_TARGET = "nbdist.panel";
export const MACHINE_PROTOCOL = 1;
export const HISTORY = 60;
export const TREND_POINTS = 300;
export const LEVELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

export type News = Greeting | PageReply | StateNews | CellsNews | BarsNews | FrameNews | PanelUpdate | HeadUpdate | PanelNote;
/**
 * What keeps ranks from going on: in a sentence, what most of them wait in, and for how many seconds.
 *
 * @minItems 3
 * @maxItems 3
 */
export type Alert = [string, string, number | null];
/**
 * One figure over all ranks, in words: its key, label, value, note, level, and action.
 *
 * @minItems 6
 * @maxItems 6
 */
export type Stat = [string, string, string, string, StatLevel | null, string];
/**
 * stale: of past steps.
 */
export type StatLevel = "bad" | "stale" | "warn";
export type Live = "ended" | "live" | "paused";
/**
 * When (seconds since 1970), the cell (0: none), and the figure of each trend; null: not known.
 *
 * @minItems 2
 */
export type Point = [number, number, ...(number | null)[]];
/**
 * The index of a row, the columns that have changed as bits, and the value of each.
 *
 * @minItems 2
 */
export type RowDelta = [number, number, ...unknown[]];
/**
 * What a map shows of all ranks, a character for each.
 */
export type Layer = "memory" | "state" | "step" | "temperature" | "utilization";
export type PanelNews = PanelUpdate | HeadUpdate | PanelNote;
export type Level = "bad" | "warn";
/**
 * What a heat map can show.
 */
export type Metric = "memory" | "step" | "temperature" | "utilization";
export type PageRequest =
  | StateRequest
  | InterruptRequest
  | InterruptNowRequest
  | StacksRequest
  | WhyRequest
  | HealRequest
  | RestartRequest
  | StopRequest
  | LogRequest
  | VariablesRequest
  | EntriesRequest
  | FiguresRequest
  | DifferenceRequest
  | PlanRequest
  | DraftRequest
  | EstimateRequest;
export type PanelWish = ViewOpened | ViewClosed | Pause | SetRate | ChooseRow | ShowMetric | MeasurePeak | TakeSnapshot;

/**
 * All that crosses.
 */
export interface Wire {
  News: News;
  PanelNews: PanelNews;
  RankRow: RankRow;
  NodeRow: NodeRow;
  Machine: Machine;
  PageOpening: PageOpening;
  PageCall: PageCall;
  PageRequest: PageRequest;
  PanelOpening: PanelOpening;
  PanelWish: PanelWish;
  NamedSession: NamedSession;
}
/**
 * What a page hears first.
 */
export interface Greeting {
  type: "greeting";
  /**
   * What this kernel speaks.
   */
  protocol: number;
  /**
   * Of nbdist.
   */
  version: string;
}
/**
 * The answer to a request.
 */
export interface PageReply {
  type: "reply";
  /**
   * The request's number.
   */
  id: number;
  /**
   * How things are now.
   */
  state: SessionState;
  /**
   * What there is to read; empty: nothing.
   */
  text: string;
  /**
   * Whether the text is an error.
   */
  failed: boolean;
  /**
   * What a "log" has brought.
   */
  log: LogPage | null;
  /**
   * What "variables" or "entries" has brought.
   */
  variables: VariableRow[] | null;
  /**
   * What "figures" has brought, by rank.
   */
  figures: FigureRow[] | null;
  /**
   * What "plan" has brought: all settings.
   */
  plan: PlanField[] | null;
  /**
   * What "plan-draft" has brought.
   */
  draft: PlanDraft | null;
}
/**
 * The notebook's session.
 */
export interface SessionState {
  /**
   * How many the session has; 0: there is none.
   */
  ranks: number;
  /**
   * Of its ranks, each once.
   */
  devices: string[];
  /**
   * Ranks that have died.
   */
  dead: number[];
  /**
   * Why the session broke; empty: it has not.
   */
  broken: string;
  /**
   * What its ranks run.
   */
  cells: CellOnRanks[];
  /**
   * Whether every cell runs on all ranks.
   */
  auto: boolean;
  /**
   * How many GPUs this machine has.
   */
  gpus: number;
  /**
   * By which name the Jupyter server lists it; empty: there is none.
   */
  session: string;
  /**
   * Whether it is broken only because somebody has stopped it from outside.
   */
  stopped: boolean;
}
/**
 * A cell that runs on ranks.
 */
export interface CellOnRanks {
  /**
   * In the notebook; 0 for a function.
   */
  number: number;
  /**
   * How many it began on.
   */
  ranks: number;
  /**
   * How many of these have ended their part.
   */
  done: number;
  /**
   * Since it began.
   */
  seconds: number;
  /**
   * The optimizer step up to which all of its ranks have come; 0: none, or nobody samples the ranks.
   */
  step: number;
}
/**
 * A part of what a rank has printed.
 */
export interface LogPage {
  /**
   * Its stdout and stderr, about 1 MiB at most.
   */
  text: string;
  /**
   * Where the next page begins; null: there is none.
   */
  next: number | null;
}
/**
 * A variable, in words.
 */
export interface VariableRow {
  /**
   * Its name.
   */
  name: string;
  /**
   * Its type; where ranks differ, all with their ranks.
   */
  kind: string;
  /**
   * Shape and dtype, likewise; empty if it has none.
   */
  form: string;
  /**
   * Where its bytes are, likewise.
   */
  device: string;
  /**
   * How much its values take; empty if that is not known.
   */
  memory: string;
  /**
   * Whether ranks agree.
   */
  agreement: string;
  /**
   * The ranks that differ from most others.
   */
  odd: number[];
  /**
   * Whether ranks agree; null: not known.
   */
  agree: boolean | null;
  /**
   * Whether it has any.
   */
  figures: boolean;
  /**
   * Whether there may be entries that differ: "entries".
   */
  inside: boolean;
}
/**
 * The figures of a tensor on a rank, as in `nbdist.wire.questions.held_variables.Figures`.
 */
export interface FigureRow {
  rank: number;
  low: number | null;
  mean: number | null;
  high: number | null;
  std: number | null;
  zeros: number;
  nans: number;
  infinite: number;
  bins: number[];
}
/**
 * A setting of the plan, as a form shows it.
 */
export interface PlanField {
  /**
   * Of the setting.
   */
  name: string;
  /**
   * Under which title it is shown; empty: above all titles.
   */
  group: string;
  /**
   * What it is for.
   */
  help: string;
  /**
   * The values it may have; empty: any text that the plan takes.
   */
  words: string[];
  /**
   * What the current plan has.
   */
  value: string;
  /**
   * What it is if nobody sets it.
   */
  default: string;
  /**
   * The strategies that it is for.
   */
  owners: string[];
  /**
   * Why the others have no use for it.
   */
  why: string;
}
/**
 * A plan that could be taken.
 */
export interface PlanDraft {
  /**
   * The magic that takes it; empty: it is the current plan.
   */
  line: string;
  /**
   * What would be different, a line for each setting.
   */
  changes: string[];
}
/**
 * The session has changed, or the page is new.
 */
export interface StateNews {
  type: "state";
  state: SessionState;
}
/**
 * Cells have begun or ended, or the page is new.
 */
export interface CellsNews {
  type: "cells";
  cells: CellRan[];
}
/**
 * A cell of the notebook that runs or has run on ranks.
 */
export interface CellRan {
  /**
   * As the page ran it with.
   */
  id: string;
  /**
   * In the notebook.
   */
  number: number;
  /**
   * Where: "0-7".
   */
  ranks: string;
  /**
   * Those that failed by themselves.
   */
  failed: string;
}
/**
 * A rank's own progress bars in a cell that a page looks at.
 */
export interface BarsNews {
  type: "bars";
  /**
   * Of the cell, as the page runs it with.
   */
  id: string;
  /**
   * Whose they are.
   */
  rank: number;
  /**
   * By the lines that stand for those of several ranks.
   */
  bars: {
    [k: string]: string;
  };
  /**
   * Whether these are all.
   */
  whole: boolean;
}
/**
 * All that the page's panel shows.
 */
export interface FrameNews {
  type: "frame";
  frame: PanelFrame;
}
/**
 * All that a panel shows, as a page gets it that opens.
 */
export interface PanelFrame {
  /**
   * Names the panel among all of a notebook.
   */
  id: string;
  /**
   * Of `ranks`: the fields of a `RankRow`.
   */
  columns: string[];
  /**
   * Of `nodes`: the fields of a `NodeRow`.
   */
  node_columns: string[];
  /**
   * Whether there are too many ranks for a row each.
   */
  heat: boolean;
  head: PanelHead;
  ranks: unknown[][];
  nodes: unknown[][];
  levels: MapLevels;
  /**
   * What each rank's sparkline shows.
   */
  history: (number | null)[][];
  /**
   * Keys of the figures that are drawn over time.
   */
  trends: string[];
  trend: Point[];
}
/**
 * What stands above the ranks.
 */
export interface PanelHead {
  title: string;
  alert: Alert | null;
  stats: Stat[];
  live: Live;
  /**
   * Seconds between two looks that are asked for.
   */
  rate: number;
}
/**
 * What a heat map draws: of each layer a character for each rank.
 */
export interface MapLevels {
  memory?: string;
  utilization?: string;
  temperature?: string;
  step?: string;
  state?: string;
}
/**
 * What a look has changed. Not frozen: it is filled until it is full.
 */
export interface PanelUpdate {
  type: "update";
  head?: HeadNews;
  point?: Point;
  nodes?: RowDelta[];
  /**
   * Stretches of what a heat map draws: the layer, the first rank, and a character for each.
   */
  levels?: [Layer, number, string][];
  ranks?: RowDelta[];
}
/**
 * What has changed of a head.
 */
export interface HeadNews {
  title?: string;
  alert?: Alert | null;
  /**
   * 0 stands for a figure that has not changed.
   */
  stats?: (Stat | 0)[];
  live?: Live;
  rate?: number;
}
/**
 * What has changed, though nothing was looked at.
 */
export interface HeadUpdate {
  type: "head";
  head: HeadNews;
}
/**
 * Something for the reader.
 */
export interface PanelNote {
  type: "note";
  text: string;
}
/**
 * One rank. Memory in MiB, shares in percent, time in milliseconds, speed in TFLOPS; null: not known.
 */
export interface RankRow {
  rank: number;
  /**
   * What it is called: its number, or "notebook".
   */
  name: string;
  /**
   * Index of its machine.
   */
  node: number;
  device: string;
  /**
   * Name of its device; empty on the CPU.
   */
  gpu: string;
  pid: number;
  /**
   * Memory of the device, or of the machine.
   */
  total: number | null;
  /**
   * In tensors; on the CPU all that is the process's own.
   */
  allocated: number | null;
  /**
   * Held by torch and empty.
   */
  cache: number | null;
  /**
   * The process's, outside of torch.
   */
  non_torch: number | null;
  /**
   * The process's as the driver reports it.
   */
  process: number | null;
  /**
   * Used by other processes.
   */
  others: number | null;
  /**
   * What the driver keeps for itself.
   */
  kept: number | null;
  /**
   * Largest `allocated`.
   */
  peak: number | null;
  utilization: number | null;
  /**
   * Degrees Celsius.
   */
  temperature: number | null;
  /**
   * Watts, as is its limit.
   */
  power: number | null;
  power_limit: number | null;
  /**
   * Cores that the process keeps busy: 100 is one.
   */
  cpu: number | null;
  state: string;
  doing: string;
  /**
   * Of a training step.
   */
  step: number | null;
  /**
   * What it takes without collectives.
   */
  work: number | null;
  flops: number | null;
  /**
   * What stands before `flops`: "≥ " where operations without a formula are missing, "≈ " where steps are.
   */
  mark: string;
  mfu: number | null;
  /**
   * What deserves a look.
   */
  badges: [Level, string][];
  /**
   * What is not known and why.
   */
  why: string;
}
/**
 * One machine. Memory in MiB, shares in percent; null: not known.
 */
export interface NodeRow {
  name: string;
  gpus: string;
  cpu: number | null;
  used: number | null;
  total: number | null;
  /**
   * Seconds between two looks.
   */
  period: number | null;
  /**
   * What else is to be said.
   */
  why: string;
}
/**
 * The machine of a server.
 */
export interface Machine {
  /**
   * What the server speaks.
   */
  protocol: number;
  /**
   * Of its nbdist.
   */
  version: string;
  host: string;
  sessions: SessionRow[];
  gpus: GpuRow[];
}
/**
 * A session.
 */
export interface SessionRow {
  /**
   * By which it is attached and stopped.
   */
  name: string;
  /**
   * Whether it has answered; if not, nothing else is known.
   */
  answers: boolean;
  /**
   * The file of its client, or of the last one; empty if unknown.
   */
  notebook: string;
  /**
   * "there", or how the last one has left.
   */
  client: string;
  /**
   * How many it has.
   */
  ranks: number;
  /**
   * The names of its machines.
   */
  nodes: string[];
  /**
   * How many its ranks use.
   */
  gpus: number;
  /**
   * Bytes that its ranks hold.
   */
  memory: number;
  /**
   * What they run.
   */
  running: RunningCell[];
  /**
   * When they were ready, in seconds since 1970.
   */
  since: number;
}
/**
 * number: in the notebook, 0 if it is not a cell. ranks: how many run it. seconds: for how long it has run.
 */
export interface RunningCell {
  number: number;
  ranks: number;
  seconds: number;
}
/**
 * A GPU, its memory in bytes, and who holds it.
 */
export interface GpuRow {
  index: number;
  name: string;
  total: number | null;
  used: number | null;
  utilization: number | null;
  holders: Holder[];
}
/**
 * A process that holds memory of a GPU.
 */
export interface Holder {
  pid: number;
  /**
   * Bytes.
   */
  memory: number;
  user: string;
  program: string;
  /**
   * Whose rank it is; empty: none of this user's here.
   */
  session: string;
}
/**
 * What a page opens its line with.
 */
export interface PageOpening {
  /**
   * Names the page.
   */
  page: string;
  /**
   * What it speaks.
   */
  protocol: number;
  /**
   * Pages that were in its place before, and are gone.
   */
  left?: string[];
}
/**
 * A message of a page: a request, a wish, or what it looks at.
 */
export interface PageCall {
  request?:
    | (
        | StateRequest
        | InterruptRequest
        | InterruptNowRequest
        | StacksRequest
        | WhyRequest
        | HealRequest
        | RestartRequest
        | StopRequest
        | LogRequest
        | VariablesRequest
        | EntriesRequest
        | FiguresRequest
        | DifferenceRequest
        | PlanRequest
        | DraftRequest
        | EstimateRequest
      )
    | null;
  wish?: (ViewOpened | ViewClosed | Pause | SetRate | ChooseRow | ShowMetric | MeasurePeak | TakeSnapshot) | null;
  look?: PageLook | null;
}
/**
 * How is the session? All replies say it.
 */
export interface StateRequest {
  do: "state";
  id: number;
}
/**
 * Interrupt what the ranks run.
 */
export interface InterruptRequest {
  do: "interrupt";
  id: number;
}
/**
 * Interrupt what the ranks run without waiting for the end of a step.
 */
export interface InterruptNowRequest {
  do: "interrupt-now";
  id: number;
}
/**
 * Where is each rank in its code?
 */
export interface StacksRequest {
  do: "stacks";
  id: number;
}
/**
 * Why did the last cell's steps take as long as they did?
 */
export interface WhyRequest {
  do: "why";
  id: number;
}
/**
 * Replace the ranks that have died.
 */
export interface HealRequest {
  do: "heal";
  id: number;
}
/**
 * Replace all ranks by fresh ones.
 */
export interface RestartRequest {
  do: "restart";
  id: number;
}
/**
 * End the session.
 */
export interface StopRequest {
  do: "stop";
  id: number;
}
/**
 * A page of what a rank has printed in a cell.
 */
export interface LogRequest {
  do: "log";
  id: number;
  /**
   * The rank.
   */
  ranks: string;
  /**
   * The cell's number in the notebook; 0: the page does not know it.
   */
  cell?: number;
  /**
   * Its id, as the page runs it with.
   */
  id_of_cell?: string;
  /**
   * Its text as the page has it.
   */
  code?: string;
  /**
   * Where in the log to begin: `next` of the page before.
   */
  position?: number;
  /**
   * Only lines with these; empty: all lines.
   */
  words?: string;
}
/**
 * What variables do the ranks have?
 */
export interface VariablesRequest {
  do: "variables";
  id: number;
  /**
   * Of the only one that is compared, however large it is; empty: all.
   */
  name?: string;
}
/**
 * What differs in a variable, as in a dict or a model?
 */
export interface EntriesRequest {
  do: "entries";
  id: number;
  name: string;
}
/**
 * The figures of a tensor on each rank.
 */
export interface FiguresRequest {
  do: "figures";
  id: number;
  name: string;
}
/**
 * Where does a tensor differ on two ranks?
 */
export interface DifferenceRequest {
  do: "difference";
  id: number;
  /**
   * The tensor's.
   */
  name: string;
  /**
   * Both: "0,3".
   */
  ranks: string;
}
/**
 * All settings of the plan.
 */
export interface PlanRequest {
  do: "plan";
  id: number;
}
/**
 * What would change with these settings?
 */
export interface DraftRequest {
  do: "plan-draft";
  id: number;
  /**
   * Those that differ from the current plan's, as text.
   */
  settings: {
    [k: string]: string;
  };
}
/**
 * What memory would a training step take?
 */
export interface EstimateRequest {
  do: "estimate";
  id: number;
  /**
   * Those that differ from the current plan's, as text.
   */
  settings: {
    [k: string]: string;
  };
  /**
   * An expression of rank 0.
   */
  model: string;
  /**
   * Likewise.
   */
  batch: string;
}
/**
 * A page shows the panel.
 */
export interface ViewOpened {
  type: "opened";
}
/**
 * A page shows it no more.
 */
export interface ViewClosed {
  type: "closed";
}
/**
 * Rest, or go on.
 */
export interface Pause {
  type: "pause";
  value: boolean;
}
/**
 * Look as often.
 */
export interface SetRate {
  type: "rate";
  /**
   * Seconds between two looks.
   */
  value: number;
}
/**
 * The reader looks at a row closely.
 */
export interface ChooseRow {
  type: "choose";
  /**
   * Its index; null: at none.
   */
  value: number | null;
}
/**
 * The reader's heat map shows this.
 */
export interface ShowMetric {
  type: "metric";
  value: Metric;
}
/**
 * Measure the peak of matrix products on all ranks.
 */
export interface MeasurePeak {
  type: "peak";
}
/**
 * Write a memory snapshot.
 */
export interface TakeSnapshot {
  type: "snapshot";
  /**
   * The rank; -1: the notebook's process.
   */
  value: number;
}
/**
 * A page shows the lines of a rank.
 */
export interface PageLook {
  /**
   * Of the cell, as the page runs it with.
   */
  id: string;
  /**
   * Which; null: no longer.
   */
  rank: number | null;
}
/**
 * What a widget opens a line of its own with. The answer is an empty `PanelGreeting`.
 */
export interface PanelOpening {
  /**
   * The panel's.
   */
  id: string;
}
/**
 * The body of a request: the session that is meant.
 */
export interface NamedSession {
  name: string;
}
