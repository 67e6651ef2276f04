/**
 * What the page and the kernel say to each other: nbdist/lab/page_messages.py has the same for the kernel.
 */

import type { Frame, Message } from "../view";

export const CONTROL = "nbdist.control";
export const VIEW = "nbdist.view";
export const PROTOCOL = 4;

/** What a button does. */
export type Deed =
  | "state"
  | "interrupt"
  | "interrupt-now"
  | "stacks"
  | "why"
  | "heal"
  | "restart"
  | "stop"
  | "log"
  | "variables"
  | "figures"
  | "difference"
  | "plan"
  | "plan-draft"
  | "estimate";

/** What a page asks for; `cell`, `position` and `words` are of a log, `name` of a variable, the last three of a plan. */
export interface Request {
  do: Deed;
  ranks?: string;
  cell?: number;
  position?: number;
  words?: string;
  name?: string;
  settings?: Record<string, string>;
  model?: string;
  batch?: string;
}

/** A page of what a rank has printed; `next`: where the next one begins, null: there is none. */
export interface LogPage {
  text: string;
  next: number | null;
}

/** A variable, in words. `size` in bytes; `agree`: whether ranks do, null: not known; `figures`: whether it has any. */
export interface VariableRow {
  name: string;
  kind: string;
  form: string;
  device: string;
  size: number | null;
  agreement: string;
  odd: number[];
  agree: boolean | null;
  figures: boolean;
}

/** The figures of a tensor on a rank; those of its finite elements. */
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

/** A setting of the plan, as a form shows it; `words`: its values, if they are a few; `owners`: strategies it is for. */
export interface PlanField {
  name: string;
  group: string;
  help: string;
  words: string[];
  value: string;
  default: string;
  owners: string[];
  why: string;
}

/** A plan that could be taken: the magic's line, empty if it is the current plan. */
export interface PlanDraft {
  line: string;
  changes: string[];
}

/** A cell that runs on ranks; seconds since it began; the step up to which all its ranks have come, 0: none, or not known. */
export interface CellOnRanks {
  number: number;
  ranks: number;
  done: number;
  seconds: number;
  step: number;
}

/** The notebook's session; `ranks` 0: there is none. */
export interface SessionState {
  protocol: number;
  version: string;
  ranks: number;
  devices: string[];
  dead: number[];
  broken: string;
  cells: CellOnRanks[];
  auto: boolean;
  gpus: number;
}

/** The answer to a request. */
export interface Reply {
  id: number;
  state: SessionState;
  text: string;
  failed: boolean;
  log: LogPage | null;
  variables: VariableRow[] | null;
  figures: FigureRow[] | null;
  plan: PlanField[] | null;
  draft: PlanDraft | null;
}

/** What a panel is told. */
export type PanelNews = Message | { type: "frame"; frame: Frame };

/** What comes over the view's line. */
export type News = PanelNews | { type: "state"; state: SessionState };
