/**
 * All words that the extension shows, in one place.
 */

import type { CellOnRanks, SessionState } from "./messages";

export const RANKS = "Ranks";
export const NO_NOTEBOOK = "Open a notebook to see its ranks.";
export const NOT_USED = "This notebook has no ranks yet.";
export const NOT_LOADED = "nbdist is not loaded in this notebook's kernel. Run %load_ext nbdist, or start ranks below.";
export const ASKING = "Waiting for the kernel. If it runs a cell, it answers when the cell has ended.";
export const NO_SESSION = "No ranks are running.";
export const KERNEL_GONE = "The kernel does not answer: it has ended, or nbdist is not loaded in it.";
export const READ_ONLY = "This notebook is read-only, so no cell can be added.";

export function anotherVersion(version: string): string {
  return `The kernel runs nbdist ${version}, which this page cannot talk to. Install the same version in both environments, and reload the page.`;
}

// --- start form

export const START = "Start ranks";
export const START_LEGEND = "Number of ranks";
export const START_EMPTY = "one for each GPU";
export const DEVICES = "GPUs";
export const DEVICES_EMPTY = "all, for example 0,2";
export const PLAN = "Plan";
export const PLAN_NONE = "no plan";
export const PRECISION = "Precision";
export const WRITES = "Adds this cell to the notebook and runs it:";
export const WRITE_AND_RUN = "Add and run";
export const BAD_COUNT = "Number of ranks: a whole number from 1 to 1024, or empty.";
export const BAD_GPUS = "GPUs: indices such as 0,2, or empty.";

// --- buttons

export const BUTTONS = {
  interrupt: ["Interrupt", "Stop what the ranks run, after the current step if they train"],
  "interrupt-now": ["Interrupt now", "Stop what the ranks run at once"],
  stacks: ["Stacks", "Show where every rank is, equal stacks grouped"],
  why: ["Why", "Show why the steps of the last cell took as long as they did"],
  heal: ["Heal", "Replace ranks that have died; the others keep their variables"],
  restart: ["Restart", "Replace all ranks by fresh ones; their variables are lost"],
  stop: ["Stop", "End all ranks and free their GPUs; their variables are lost"],
} as const;

export const CONFIRM = {
  restart: ["Restart the ranks?", "The variables of all ranks are lost."],
  stop: ["Stop the ranks?", "The variables of all ranks are lost, and their GPUs are free."],
} as const;

export const WORKING = "…";
export const DONE = "Done.";
export const CLEAR = "Clear";

// --- where a cell runs

export const RUN_ON = "Run cell on";
export const ON_KERNEL = "kernel";
export const ON_ALL = "all ranks";
export const CHOOSE = "ranks …";
export const CHOOSE_TITLE = "Run this cell on which ranks?";
export const CHOOSE_LABEL = "Ranks, for example 0,2-3";
export const CATEGORY = "Ranks";
export const TOGGLE_COMMAND = "Run Cell on All Ranks or in the Kernel";
export const CHOOSE_COMMAND = "Run Cell on Chosen Ranks…";
export const SHOW_COMMAND = "Show Ranks";

export function onRanks(ranks: string): string {
  if (ranks === "") return ON_ALL;
  return /^\d+$/.test(ranks) ? `rank ${ranks}` : `ranks ${ranks}`;
}

export function badRanks(text: string): string {
  return `'${text}' does not name ranks: write 0,2-3`;
}

// --- what runs

/** "4 ranks on cuda:0-3; 1 has died". */
export function summary(state: SessionState): string {
  if (state.broken !== "") return state.broken;
  if (state.ranks === 0) return NO_SESSION;
  const dead = state.dead.length === 0 ? "" : `; died: ${state.dead.join(", ")}`;
  return `${counted(state.ranks, "rank")} on ${state.devices.join(", ")}${dead}${state.auto ? "; auto is on" : ""}`;
}

/** "cell 7: 3 of 8 done, 12 s", where `age` are the seconds since the kernel has told it. */
export function progress(cell: CellOnRanks, age: number): string {
  const name = cell.number === 0 ? "a function" : `cell ${cell.number}`;
  return `${name}: ${cell.done} of ${cell.ranks} done, ${(cell.seconds + age).toFixed(0)} s`;
}

/** For the status bar: "4 ranks: [3 of 8 done]". */
export function status(state: SessionState): string {
  if (state.broken !== "") return "Ranks: session broke";
  const [cell] = state.cells;
  const dead = state.dead.length === 0 ? "" : `, ${state.dead.length} dead`;
  const busy = cell === undefined ? "idle" : `[${cell.done} of ${cell.ranks} done]`;
  return `${counted(state.ranks, "rank")}${dead}: ${busy}`;
}

function counted(count: number, what: string): string {
  return `${count} ${what}${count === 1 ? "" : "s"}`;
}

// --- output by rank

export const ALL_TAB = "all";
export const SEARCH = "Search";
export const COPY = "Copy";
export const COPIED = "Copied";
export const OUTPUT_BY_RANK = "Output by rank";
export const NO_LINES = "No such lines.";

export function lineCount(count: number): string {
  return counted(count, "line");
}
