/**
 * What the page and the kernel say to each other: nbdist/lab/page_messages.py has the same for the kernel.
 */

import type { Frame, Message } from "../view";

export const TARGET = "nbdist.page";
export const PROTOCOL = 6;

/** What a button does. */
export type ActionName =
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
  | "entries"
  | "figures"
  | "difference"
  | "plan"
  | "plan-draft"
  | "estimate";

/** What a page asks for; `cell` to `words` are of a log, `name` of a variable, the last three of a plan. */
export interface Request {
  do: ActionName;
  ranks?: string;
  cell?: number;
  id_of_cell?: string;
  code?: string;
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

/** A variable, in words. `agree`: whether ranks do, null: not known; `figures`: whether it has any; `inside`: entries that may differ. */
export interface VariableRow {
  name: string;
  kind: string;
  form: string;
  device: string;
  memory: string;
  agreement: string;
  odd: number[];
  agree: boolean | null;
  figures: boolean;
  inside: boolean;
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

/** A cell that runs or has run on ranks: its id and number in the notebook, where it ran and where it failed: "0,2-3". */
export interface CellRan {
  id: string;
  number: number;
  ranks: string;
  failed: string;
}

/**
 * The notebook's session; `ranks` 0: there is none. `session`: its name in the Jupyter server's list, empty: none.
 * `stopped`: it is broken only because somebody has stopped it from outside.
 */
export interface SessionState {
  ranks: number;
  devices: string[];
  dead: number[];
  broken: string;
  cells: CellOnRanks[];
  auto: boolean;
  gpus: number;
  session: string;
  stopped: boolean;
}

/** What comes first: what the kernel speaks. */
export interface Greeting {
  type: "greeting";
  protocol: number;
  version: string;
}

/** The answer to a request. */
export interface Reply {
  type: "reply";
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

/** A rank's own bars in a cell, by the lines that stand for those of several ranks; `whole`: these are all. */
export interface OwnBars {
  type: "bars";
  id: string;
  rank: number;
  bars: Record<string, string>;
  whole: boolean;
}

/** What the kernel sends. */
export type News = Greeting | Reply | { type: "state"; state: SessionState } | { type: "cells"; cells: CellRan[] } | OwnBars | PanelNews;
