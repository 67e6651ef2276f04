/**
 * The lines of a cell's output by rank: "[0-2] text" is a line of ranks 0, 1 and 2. Text in, text out; independent of pages.
 */

const LABEL = /^\[([0-9,-]+)\](?: \([^)]*\))? /;
const SPAN = /^(\d+)(?:-(\d+))?$/;
const MOST_RANKS = 65_536; // a number beyond is no rank: a program may print "[0-9999999]", too
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
  return (spansOf(label) ?? []).flatMap(([first, last]) => Array.from({ length: last - first + 1 }, (_, index) => first + index));
}

/** The first and last ranks that a label names. Null: it is not as nbdist writes one, ascending, each rank once. */
function spansOf(label: string): [number, number][] | null {
  const spans: [number, number][] = [];
  let before = -1;
  for (const span of label.split(",")) {
    const match = SPAN.exec(span);
    const first = Number(match?.[1]);
    const last = Number(match?.[2] ?? first);
    if (match === null || first <= before || last < first || last >= MOST_RANKS) return null;
    spans.push([first, last]);
    before = last;
  }
  return spans;
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

/** A line without its colors, as a terminal would show it. */
export function shownOf(text: string): string {
  return settled(text).replace(COLORS, "");
}

/** Take a line apart. */
export function lineOf(text: string): Line {
  const shown = shownOf(text);
  const match = LABEL.exec(shown);
  const label = match?.[1] ?? "";
  return match === null || spansOf(label) === null ? ["", shown] : [label, shown.slice(match[0].length)];
}

/** A line without its label, as a terminal would show it, in its colors. */
export function coloredTextOf(row: string): string {
  const text = settled(row);
  const match = LABEL.exec(text);
  return match !== null && spansOf(match[1] ?? "") !== null ? text.slice(match[0].length) : lineOf(row)[0] === "" ? text : lineOf(row)[1];
}

/** What a terminal shows of a line that was written over. */
export function settled(row: string): string {
  const ended = row.replace(/\r+$/, "");
  return ended.slice(ended.lastIndexOf("\r") + 1);
}
