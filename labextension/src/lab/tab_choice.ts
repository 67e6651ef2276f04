/**
 * What the tabs above a cell's output decide without the page: which run they show, which tab is beside another, and what
 * to say of output that may be missing.
 */

import type { CellRan } from "../generated/wire";
import type { Link } from "./link";
import * as words from "./strings";

/** The run that a cell shows: of those that the kernel has told, the first with the cell's number, which it lacks while it runs. */
export function runShown(told: (CellRan | null)[], number: number | null | undefined): CellRan | null {
  return told.find((run) => run !== null && (number === null || number === run.number)) ?? null;
}

/**
 * The tab some steps to the right of a rank's, or the last there is.
 *
 * @param rank - null: of all ranks, the tab on the left.
 */
export function tabBeside(ranks: readonly number[], rank: number | null, steps: number): number | null {
  const all = [null, ...ranks];
  return all[Math.max(0, Math.min(all.length - 1, all.indexOf(rank) + steps))] ?? null;
}

/**
 * What to say of a connection that was closed while a cell ran.
 *
 * @param gap - What was said before; it stays when the connection is there again.
 * @param runs - Whether the cell has no number; so has one that has never run, and has no output.
 */
export function gapAfter(gap: string, { closed, kernelGone }: Pick<Link, "closed" | "kernelGone">, runs: boolean, hasOutput: boolean): string {
  if (!runs) return gap;
  const now = closed && hasOutput ? gap || words.GAP : gap;
  return kernelGone && now !== "" ? words.GAP_AT_END : now;
}
