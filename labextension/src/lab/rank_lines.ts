/**
 * The lines of a cell's output by rank: "[0-2] text" is a line of ranks 0, 1 and 2. Text in, text out; knows no page.
 */

const LABEL = /^\[([0-9,-]+)\](?: \([^)]*\))? /;
const ESCAPE = String.fromCharCode(27);
const COLORS = new RegExp(`${ESCAPE}\\[[0-9;]*[A-Za-z]`, "g");

/** A line and the label that it begins with, "0-2"; "": a line of no rank. */
export type Line = [label: string, text: string];

/** The lines of a text with labels and colors in place, as a terminal would show them. */
export function rowsOf(text: string): string[] {
  const rows = text.split("\n");
  if (rows.at(-1) === "") rows.pop();
  return text.includes("\r") ? rows.map(settled) : rows;
}

/** The ranks that a label names: "0,2-3". */
export function ranksOf(label: string): number[] {
  return label.split(",").flatMap((span) => {
    const [first, last] = span.split("-").map(Number);
    if (first === undefined || span === "") return [];
    return Array.from({ length: Math.max(0, (last ?? first) - first) + 1 }, (_, index) => first + index);
  });
}

/** Counts who has printed which text. */
export class Tally {
  private readonly counts = new Map<string, string | Map<string, number>>(); // by text: one label, or how often which

  add(label: string, text: string): void {
    if (label === "") return;
    const known = this.counts.get(text);
    if (known === undefined) this.counts.set(text, label);
    else if (typeof known === "string") this.counts.set(text, label === known ? new Map([[label, 2]]) : new Map([[known, 1], [label, 1]]));
    else known.set(label, (known.get(label) ?? 0) + 1);
  }

  /** The texts that some ranks have printed and others have not, or less often. */
  *odd(ranks: number): Generator<void, Set<string>> {
    const named = new Map<string, number[]>();
    const found = new Set<string>();
    for (const [text, count] of this.counts) {
      if (!isEven(typeof count === "string" ? new Map([[count, 1]]) : count, ranks, named)) found.add(text);
      yield;
    }
    return found;
  }
}

/** Whether all ranks have the same count. */
function isEven(byLabel: Map<string, number>, ranks: number, named: Map<string, number[]>): boolean {
  const byRank = new Map<number, number>();
  for (const [label, count] of byLabel) {
    let those = named.get(label);
    if (those === undefined) named.set(label, (those = ranksOf(label)));
    if (byLabel.size === 1) return those.length === ranks;
    for (const rank of those) byRank.set(rank, (byRank.get(rank) ?? 0) + count);
  }
  return byRank.size === ranks && new Set(byRank.values()).size === 1;
}

/** Take a line apart. */
export function lineOf(text: string): Line {
  const shown = settled(text).replace(COLORS, "");
  const match = LABEL.exec(shown);
  return match === null ? ["", shown] : [match[1] ?? "", shown.slice(match[0].length)];
}

/** What a terminal shows of a line that was written over. */
function settled(row: string): string {
  const ended = row.replace(/\r+$/, "");
  return ended.slice(ended.lastIndexOf("\r") + 1);
}
