/**
 * All words that the extension shows, in one place.
 */

import type { CellOnRanks, FigureRow, Holder, SessionRow, SessionState } from "../generated/wire";

export const RANKS = "Ranks";
export const NO_NOTEBOOK = "Open a notebook to see its ranks.";
export const NOT_USED = "This notebook has no ranks yet.";
export const NOT_LOADED = "nbdist is not loaded in this notebook's kernel. Run %load_ext nbdist, or start ranks below.";
export const ASKING = "Waiting for the kernel. If it is running a cell, it answers when the cell ends.";
export const NO_SESSION = "No ranks are running.";
export const KERNEL_GONE = "The kernel does not answer: it has ended, or nbdist is not loaded in it.";
export const NO_KERNEL = "This notebook has no running kernel. To start one, reload the page or use the Kernel menu. Sessions that outlived a kernel are listed under This machine.";
export const CUT = "The Jupyter server cannot be reached. The ranks keep running unless the server was stopped; the page reconnects automatically.";
export const CUT_IDLE = "The Jupyter server cannot be reached; the page reconnects automatically.";
export const CUT_STATUS = "Ranks: no connection";
export const CUT_OUTPUT = "No connection: there may be newer lines";
export const GAP = "Reconnected: a line may be missing";
export const GAP_AT_END = "The kernel has ended: a line may be missing";
export const CUT_OFF = "Newer lines are in the log: choose a rank and click Log";
export const GAP_CAPTION = "The Jupyter server may lose a message while the page reconnects. Once the cell has ended, choose a rank's tab and click Log to see every line.";
export const READ_ONLY = "This notebook is read-only, so no cell can be added.";

export function anotherVersion(version: string): string {
  return `The kernel runs nbdist ${version}, which does not match this page's version. Install the same version in both environments, and reload the page.`;
}

// --- start form

export const START = "Start ranks";
export const START_NOTE = "Ranks are processes that run cells with %%distributed in their first line, each on its own GPU if there are any.";
export const START_CAPTION_CPU = "How many ranks to start; empty: 2";
export const PLAN = "Plan";
export const PLAN_UNSET = "not set here";
export const PLAN_CAPTION = "Adds a line that sets the plan; 'not set here' leaves the plan as it is";
export const PRECISION = "Precision";
export const WRITES = "Adds this cell to the notebook and runs it:";
export const WRITE_AND_RUN = "Add and run";

// --- plan form

export const PLAN_TITLE = "Plan";
export const PLAN_SAME = "This is already the plan.";
export const PLAN_RUN = "Add and run the plan";
export const ESTIMATE = "Estimate memory";
export const ESTIMATE_MODEL = "Model";
export const ESTIMATE_BATCH = "Micro-batch";
export const ESTIMATE_NEEDS = "For an estimate, define a model and a micro-batch on rank 0, and enter their names here.";
export const ESTIMATE_OLD = "The form has changed since this estimate.";

/** "gradient_as_bucket_view" in words. */
export function settingName(name: string): string {
  return name.replaceAll("_", " ");
}

// --- buttons

export const BUTTONS = {
  interrupt: ["Interrupt", "Stop the running cells, after the current step if they train"],
  "interrupt-now": ["Interrupt now", "Stop the running cells immediately"],
  stacks: ["Stacks", "Show where every rank is, with equal stacks grouped"],
  why: ["Why", "Show why the steps of the last cell took as long as they did"],
  heal: ["Heal", "Replace ranks that have died; the others keep their variables"],
  restart: ["Restart", "Replace all ranks with fresh ones; their variables are lost"],
  stop: ["Stop", "End all ranks; their variables are lost"],
} as const;

/** The same in the command palette. */
export const COMMANDS = {
  interrupt: "Interrupt Ranks After the Step",
  "interrupt-now": "Interrupt Ranks Now",
  stacks: "Show Stacks of Ranks",
  why: "Show Why Steps Took as Long as They Did",
  heal: "Heal Ranks",
  restart: "Restart Ranks…",
  stop: "Stop Ranks…",
} as const;

export const CONFIRM = { restart: "Restart the ranks?", stop: "Stop the ranks?" } as const;

/** @param freesGpus - Whether the ranks give GPUs back. */
export function stopCaption(freesGpus: boolean): string {
  return freesGpus ? "End all ranks and free their GPUs; their variables are lost" : BUTTONS.stop[1];
}

/** @param freesGpus - Whether the ranks give GPUs back. */
export function loss(freesGpus: boolean): string {
  return `The variables of all ranks are lost${freesGpus ? ", and their GPUs are free" : ""}.`;
}

export const WORKING = "…";
export const DONE = "Done.";
export const CLEAR = "Clear";

// --- where a cell runs

export const RUN_ON = "Run cell on";
export const runOn = (place: string): string => `${RUN_ON}: ${place}`;
export const ON_KERNEL = "kernel";
export const ON_ALL = "all ranks";
export const CHOOSE = "ranks …";
export const CHOOSE_TITLE = "Run this cell on which ranks?";
export const CHOOSE_LABEL = "Ranks, for example 0,2-3";
export const READ_ONLY_CELL = "This cell is read-only.";
export const NOT_MOVED_TITLE = "This cell stays in the kernel";
export const CATEGORY = "Ranks";
export const TOGGLE_COMMAND = "Run Cell on All Ranks or in the Kernel";
export const CHOOSE_COMMAND = "Run Cell on Chosen Ranks…";
export const SHOW_COMMAND = "Show Ranks";

export function onRanks(ranks: string): string {
  if (ranks === "") return ON_ALL;
  return /^\d+$/.test(ranks) ? `rank ${ranks}` : `ranks ${ranks}`;
}

export function badRanks(text: string): string {
  return `'${text}' is not a list of ranks: write, for example, 0,2-3`;
}

export function notMoved(line: string): string {
  return `A cell with the line '${line}' cannot run on ranks. Move that line to its own cell.`;
}

// --- what runs

/** "4 ranks on cuda:0-3; 1 has died". */
export function summary(state: SessionState): string {
  if (state.broken !== "") return state.broken;
  if (state.ranks === 0) return NO_SESSION;
  const dead = state.dead.length === 0 ? "" : `; died: ${state.dead.join(", ")}`;
  return `${counted(state.ranks, "rank")} on ${state.devices.join(", ")}${dead}${state.auto ? "; auto is on" : ""}`;
}

/** "cell 7: 3 of 8 done, step 340, 12 s", where `age` are the seconds since the kernel has told it. */
export function progress(cell: CellOnRanks, age: number): string {
  const name = cell.number === 0 ? "a function" : `cell ${cell.number}`;
  return `${name}: ${cell.done} of ${cell.ranks} done, ${step(cell)}${(cell.seconds + age).toFixed(0)} s`;
}

function step(cell: CellOnRanks): string {
  return cell.step === 0 ? "" : `step ${cell.step.toLocaleString("en")}, `;
}

/** For the status bar: "4 ranks: [3 of 4 done]", "4 ranks: step 340, [3 of 4 done]"; without ranks nothing. */
export function status(state: SessionState): string {
  if (state.broken !== "") return state.stopped ? "Ranks: stopped" : "Ranks: session broke";
  if (state.ranks === 0) return "";
  const dead = state.dead.length === 0 ? "" : `, ${state.dead.length} dead`;
  return `${counted(state.ranks, "rank")}${dead}: ${busy(state.cells)}`;
}

/** "idle", "step 340, [3 of 4 done]", "2 cells, [1 of 4 done]": a rank runs one cell at a time. */
function busy(cells: CellOnRanks[]): string {
  const [cell] = cells;
  if (cell === undefined) return "idle";
  const done = cells.reduce((sum, each) => sum + each.done, 0);
  const ranks = cells.reduce((sum, each) => sum + each.ranks, 0);
  return `${cells.length === 1 ? step(cell) : `${counted(cells.length, "cell")}, `}[${done} of ${ranks} done]`;
}

function counted(count: number, what: string): string {
  return `${count} ${what}${count === 1 ? "" : "s"}`;
}

// --- output by rank

export const ALL_TAB = "all";
export const SEARCH = "Search";
export const COPY = "Copy";
export const COPY_CAPTION = "Copy these lines";
export const COPIED = "Copied";
export const DOWNLOAD = "Download";
export const DOWNLOAD_CAPTION = "Save these lines as a file";
export const DIFFER = "Differences";
export const DIFFER_CAPTION = "Show only lines that some ranks printed and others did not";
export const FOLLOW = "Follow";
export const FOLLOW_CAPTION = "Keep the newest line in view";
export const ALL_RANKS = "all ranks";
export const LOG = "Log";
export const LOG_CAPTION = "Read from the session's log, which also has what the notebook does not show";
export const EARLIER = "Earlier";
export const LATER = "Later";
export const OUTPUT_BY_RANK = "Output by rank";
export const outputOf = (rank: string): string => `${OUTPUT_BY_RANK}: ${rank}`;
export const NO_LINES = "No matching lines.";
export const NOTHING_PRINTED = "This rank has printed nothing.";

/** "rank 2", "rank 2, failed". */
export function ofRank(rank: number, failed: boolean): string {
  return `rank ${rank}${failed ? ", failed" : ""}`;
}

/** In a menu: "2, failed". */
export function failedName(rank: number): string {
  return `${rank}, failed`;
}

export function lineCount(count: number): string {
  return counted(count, "line");
}

/** "page 3", "page 4, the last". */
export function logPage(page: number, more: boolean): string {
  return `page ${page}${more ? "" : ", the last"}`;
}

// --- the machine

export const MACHINE = "This machine";
export const SESSIONS = "Sessions";
export const GPUS = "GPUs";
export const SERVER_WITHOUT_US =
  "The Jupyter server has not loaded nbdist, so its sessions and GPUs are not shown. Install nbdist in the server's environment, and restart the server.";
export const SERVER_OTHER = "The Jupyter server has another version of nbdist. Install the same version in both environments, and restart the server.";
export const SERVER_SILENT = "The Jupyter server does not answer.";
export const NO_ANSWER = "does not answer";
export const ATTACH = "Attach";
export const ATTACH_CAPTION = "Adds a cell to the notebook that takes this session over, and runs it";
export const TAKE_CAPTION = "Adds a cell to the notebook that takes this session from the one that has it, and runs it";
export const TAKE = "Take";
export const TAKE_QUESTION = ["Take the session?", "Another notebook is using it and will lose it. Its ranks, their variables, and running cells are kept."] as const;

/** "vm: 2 sessions, 8 GPUs". */
export function machineSummary(host: string, sessions: number, gpus: number): string {
  return `${host}: ${sessions === 0 ? "no sessions" : counted(sessions, "session")}, ${gpus === 0 ? "no NVIDIA GPUs" : counted(gpus, "GPU")}`;
}

/** "58edd547: train.ipynb". */
export function sessionName(name: string, notebook: string): string {
  return notebook === "" ? name : `${name}: ${notebook.split("/").at(-1) ?? ""}`;
}

/** What it has, what it runs, and whose it is. */
export function sessionFacts(session: SessionRow, memory: string): string[] {
  const nodes = session.nodes.length > 1 ? ` on ${session.nodes.join(", ")}` : "";
  const gpus = session.gpus === 0 ? "" : `, ${counted(session.gpus, "GPU")}`;
  const cells = session.running.map((cell) => `${cell.number === 0 ? "a function" : `cell ${cell.number}`} for ${cell.seconds.toFixed(0)} s`);
  const runs = cells.length === 0 ? "idle" : `runs ${cells.join(", ")}`;
  const since = session.since === 0 ? "starting" : `since ${new Date(1000 * session.since).toLocaleString([], { dateStyle: "short", timeStyle: "short" })}`;
  const facts = [`${counted(session.ranks, "rank")}${nodes}${gpus}, ${memory}`, `${runs}; ${since}`];
  return session.client === "there" ? facts : [...facts, `its notebook: ${session.client}`];
}

export function stopQuestion({ name, notebook, gpus }: SessionRow): string {
  return `Session ${sessionName(name, notebook)}. ${loss(gpus > 0)}`;
}

export function gpuName(index: number, name: string): string {
  return `GPU ${index}: ${name}`;
}

export function gpuFacts(used: string, total: string, busy: string): string {
  return `${used} of ${total}, ${busy} busy`;
}

/** "session 58edd547: 61.2 GiB", "alice, python (pid 4711): 12.0 GiB". */
export function holderLine(holder: Holder, memory: string): string {
  if (holder.session !== "") return `session ${holder.session}: ${memory}`;
  const who = [holder.user, holder.program].filter(Boolean).join(", ");
  return `${who === "" ? "" : `${who} `}(pid ${holder.pid}): ${memory}`;
}

// --- variables

export const VARIABLES = "Variables";
export const REFRESH = "Refresh";
export const NO_VARIABLES = "Cells on these ranks have not set any variables.";
export const ENTRIES = "Entries that differ";
export const NO_ENTRIES = "None of its entries differs.";
export const ODD = "not finite";
export const FIGURES = ["rank", "histogram", ODD, "min", "mean", "max", "std"] as const;
export const HISTOGRAM = "Histogram, from the smallest to the largest value on any rank";
export const FIRST_RANK = "First rank";
export const SECOND_RANK = "Second rank";
export const COMPARE = "Compare";

/** An answer to a question that was asked before the table was read again. */
export function before(answer: string): string {
  return `Before the table was refreshed: ${answer}`;
}

export function figure(value: number | null): string {
  return value === null ? "n/a" : `${Number(value.toPrecision(5))}`;
}

/** "3 NaN, 1 inf". */
export function special({ nans, infinite }: FigureRow): string {
  return [nans > 0 ? `${nans} NaN` : "", infinite > 0 ? `${infinite} inf` : ""].filter(Boolean).join(", ");
}
