/**
 * What the page and the kernel say to each other: nbdist/lab/page_messages.py has the same for the kernel.
 */

import type { Frame, Message } from "../view";

export const CONTROL = "nbdist.control";
export const VIEW = "nbdist.view";
export const PROTOCOL = 1;

/** What a button does. */
export type Deed = "state" | "interrupt" | "interrupt-now" | "stacks" | "why" | "heal" | "restart" | "stop";

/** A cell that runs on ranks; seconds since it began. */
export interface CellOnRanks {
  number: number;
  ranks: number;
  done: number;
  seconds: number;
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
}

/** What a panel is told. */
export type PanelNews = Message | { type: "frame"; frame: Frame };

/** What comes over the view's line. */
export type News = PanelNews | { type: "state"; state: SessionState };
