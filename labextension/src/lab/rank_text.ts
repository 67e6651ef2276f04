/**
 * A cell's output taken apart by rank, while it grows, and the lines of it that a reader wants. Knows no page.
 */

import { differing, linesOf, ranksOf, type Line } from "./rank_lines";

const SLICE = 100_000; // characters that are taken apart at a time

/** One output. */
interface Part {
  text: string; // its whole lines
  whole: number; // how many these are
  lines: Line[]; // and the one that has begun
  labels: Set<string>;
}

/** What a reader wants to see. `rank`: null for all. `differ`: only lines that not all ranks have alike. */
export interface Choice {
  rank: number | null;
  words: string;
  differ: boolean;
}

export class RankText {
  /** Those that have printed, ascending. */
  ranks: number[] = [];
  private parts: Part[] = [];
  private seen = new Map<string, number[]>(); // which ranks a label names
  private found = new Map<Part, { whole: number; lines: string[] }>(); // what has been chosen of whole lines
  private choice = "";

  /** Take the outputs of a cell as they are now. */
  async take(texts: Iterable<string>): Promise<void> {
    const parts: Part[] = [];
    for (const text of texts) parts.push(await taken(text, this.parts[parts.length]));
    this.parts = parts;
    this.seen = new Map(parts.flatMap(({ labels }) => [...labels].map((label): [string, number[]] => [label, ranksOf(label)])));
    this.ranks = [...new Set([...this.seen.values()].flat())].sort((one, other) => one - other);
  }

  /** The lines that are wanted; with their labels where those of all ranks are. */
  lines(choice: Choice): string[] {
    const wanted = this.test(choice);
    const shown = ([label, text]: Line): string => (choice.rank === null && label !== "" ? `[${label}] ${text}` : text);
    const key = JSON.stringify(choice);
    if (key !== this.choice || choice.differ) this.found.clear(); // more output may make lines alike
    this.choice = key;
    const all: string[] = [];
    for (const part of this.parts) {
      const found = this.found.get(part) ?? { whole: 0, lines: [] };
      for (; found.whole < part.whole; found.whole++) {
        const line = part.lines[found.whole];
        if (line !== undefined && wanted(line)) found.lines.push(shown(line));
      }
      this.found.set(part, found);
      for (const line of found.lines) all.push(line);
      for (const line of part.lines.slice(part.whole)) if (wanted(line)) all.push(shown(line));
    }
    for (const part of this.found.keys()) if (!this.parts.includes(part)) this.found.delete(part);
    return all;
  }

  private test({ rank, words, differ }: Choice): (line: Line) => boolean {
    const labels = new Set([...this.seen].filter(([, ranks]) => rank === null || ranks.includes(rank)).map(([label]) => label));
    const odd = differ ? differing(this.all(), this.ranks.length) : null;
    const lower = words.toLowerCase();
    return ([label, text]) =>
      (labels.has(label) || (rank === null && label === "" && odd === null)) &&
      (lower === "" || text.toLowerCase().includes(lower)) &&
      (odd === null || odd.has(text));
  }

  private *all(): Generator<Line> {
    for (const { lines } of this.parts) yield* lines;
  }
}

/** Take a text apart, in slices, so that the page stays the reader's. It mostly goes on where it has ended before. */
async function taken(text: string, known: Part | undefined): Promise<Part> {
  const part = known !== undefined && text.startsWith(known.text) ? known : { text: "", whole: 0, lines: [], labels: new Set<string>() };
  const end = text.lastIndexOf("\n") + 1;
  part.lines.length = part.whole;
  for (let from = part.text.length; from < end; ) {
    const to = from + SLICE < end ? text.indexOf("\n", from + SLICE) + 1 : end;
    add(part, text.slice(from, to));
    from = to;
    if (from < end) await new Promise((resolve) => setTimeout(resolve));
  }
  part.text = text.slice(0, end);
  part.whole = part.lines.length;
  add(part, text.slice(end));
  return part;
}

function add(part: Part, text: string): void {
  for (const line of linesOf(text)) {
    part.lines.push(line);
    if (line[0] !== "") part.labels.add(line[0]);
  }
}
