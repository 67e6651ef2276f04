/**
 * A cell's output taken apart by rank, while it grows, and the lines of it that a reader wants. Independent of pages.
 *
 * Of a line only its place and its label are kept, eight bytes: there may be hundreds of thousands.
 */

import { Numbers } from "./numbers";
import { coloredTextOf, lineOf, ranksOf, settled, shownOf, Tally } from "./rank_lines";
import { inSlices } from "./slices";

const PAUSE = 32; // lines between two looks at the clock

/** Lines in their order, any of them at a time, in a terminal's colors. */
export interface Rows {
  readonly length: number;
  slice(from: number, to: number): readonly string[];
}

/** What a reader wants to see. `rank`: null for all. `differ`: only lines that not all ranks have alike. */
export interface Choice {
  rank: number | null;
  words: string;
  differ: boolean;
}

/** One output of a cell. `ofAll`: its lines have no labels and belong to every rank, as those of an error do. */
export interface Output {
  readonly text: string;
  readonly ofAll: boolean;
}

/** An output that has been taken apart. */
interface Part {
  readonly ofAll: boolean;
  text: string;
  taken: number; // how many of its characters have been taken apart
  whole: number; // how many of its lines have ended
  starts: Numbers; // of these, and of the one that has begun
  labels: Numbers; // of the same: a place among all labels
}

/** Which lines of a part have been chosen, of those that have been looked at. */
interface Found {
  looked: number;
  lines: Numbers;
}

export class RankText {
  /** Those that have printed, ascending, and those that are known to have run the cell. */
  ranks: number[] = [];
  /** Whether there is something to choose from: the output of several ranks, or of none but of all. */
  several = false;
  private parts: Part[] = [];
  private own: ReadonlyMap<string, string> = new Map(); // the chosen rank's bars, by the lines that stand for those of several
  private readonly labels: string[] = [""];
  private readonly numbers = new Map([["", 0]]); // of labels
  private found = new Map<Part, Found>();
  private choice = "";
  private finding = 0;

  /**
   * Take the outputs of a cell as they are now.
   *
   * @param ran - The ranks that have run it, as far as they are known.
   */
  async take(outputs: Iterable<Output>, ran: readonly number[] = []): Promise<void> {
    const parts: Part[] = [];
    for (const { text, ofAll } of outputs) {
      const known = this.parts[parts.length];
      const part = known?.ofAll === ofAll && isLonger(text, known) ? known : emptyPart(ofAll);
      await inSlices(this.takeApart(part, text));
      parts.push(part);
    }
    this.parts = parts;
    const named = new Set<number>();
    for (const { labels } of parts) for (let line = 0; line < labels.length; line++) named.add(labels.at(line));
    const ranks = new Set<number>();
    for (const label of named) for (const rank of ranksOf(this.labels[label] ?? "")) ranks.add(rank);
    this.ranks = [...new Set([...ranks, ...ran])].sort((one, other) => one - other);
    this.several = ranks.size > 1 || (this.ranks.length > 1 && parts.some(({ ofAll }) => ofAll));
  }

  /**
   * Take what a rank's own bars show, by the lines for several ranks whose place they take where it is chosen.
   */
  takeBars(own: ReadonlyMap<string, string>): void {
    this.own = own;
    this.found.clear();
  }

  /** The lines that are wanted, with their labels where those of all ranks are. Null: something else is wanted by now. */
  async find(choice: Choice): Promise<Rows | null> {
    const finding = ++this.finding;
    const key = JSON.stringify(choice);
    if (key !== this.choice || choice.differ) this.found.clear(); // more output may make lines alike
    this.choice = key;
    for (const part of this.found.keys()) if (!this.parts.includes(part)) this.found.delete(part);
    return inSlices(this.look(choice), () => finding !== this.finding);
  }

  private *look(choice: Choice): Generator<void, Rows> {
    const wanted = yield* this.test(choice);
    const { parts } = this;
    for (const part of parts) {
      const found = this.found.get(part) ?? { looked: 0, lines: new Numbers() };
      this.found.set(part, found);
      for (; found.looked < part.whole; found.looked++) {
        if (wanted(part, found.looked)) found.lines.push(found.looked);
        if (found.looked % PAUSE === 0) yield;
      }
    }
    const chosen: Chosen[] = [];
    for (const part of parts) {
      const { lines } = this.found.get(part) ?? { lines: new Numbers() };
      chosen.push([part, lines, lines.length]);
      if (part.starts.length > part.whole && wanted(part, part.whole)) chosen.push([part, [part.whole], 1]);
    }
    return new ChosenRows(chosen, (part, line) => {
      if (choice.rank !== null) return this.bar(part, line) ?? textAt(part, line);
      const label = this.label(part, line);
      return label === "" ? textAt(part, line) : `[${label}] ${textAt(part, line)}`;
    });
  }

  private *test({ rank, words, differ }: Choice): Generator<void, (part: Part, line: number) => boolean> {
    const mine = new Set(this.labels.map((_, number) => number).filter((number) => rank === null || ranksOf(this.labels[number] ?? "").includes(rank)));
    if (differ || rank !== null) mine.delete(0);
    const odd = differ ? yield* this.odd() : null;
    const lower = words.toLowerCase();
    return (part, line) => {
      const bar = rank === null ? undefined : this.bar(part, line);
      if (part.ofAll ? differ : bar === undefined && !mine.has(part.labels.at(line))) return false;
      if (lower === "" && odd === null) return true;
      const text = bar ?? textAt(part, line);
      return (lower === "" || shownOf(text).toLowerCase().includes(lower)) && (odd === null || odd.has(text));
    };
  }

  /** The texts that some ranks have printed and others have not, or less often. */
  private *odd(): Generator<void, Set<string>> {
    const tally = new Tally();
    for (const part of this.parts) {
      for (let line = 0; line < part.starts.length; line++) {
        tally.add(this.label(part, line), textAt(part, line));
        if (line % PAUSE === 0) yield;
      }
    }
    return yield* tally.odd(this.ranks.length);
  }

  /** What the chosen rank's own bar shows, where the line stands for those of several ranks. */
  private bar(part: Part, line: number): string | undefined {
    return this.own.size === 0 || part.ofAll ? undefined : this.own.get(shownOf(rowAt(part, line)).trimEnd());
  }

  private label(part: Part, line: number): string {
    return this.labels[part.labels.at(line)] ?? "";
  }

  /** Note where a text's lines begin, and their labels. It mostly goes on where it has ended before. */
  private *takeApart(part: Part, text: string): Generator<void, void> {
    let start = endOfWhole(part);
    part.text = text;
    part.starts.cut(part.whole);
    part.labels.cut(part.whole);
    while (start < text.length) {
      const end = text.indexOf("\n", start);
      part.starts.push(start);
      part.labels.push(part.ofAll ? 0 : this.number(lineOf(text.slice(start, end < 0 ? text.length : end))[0]));
      part.taken = end < 0 ? text.length : end + 1;
      if (end < 0) return;
      part.whole++;
      start = end + 1;
      if (part.whole % PAUSE === 0) yield;
    }
  }

  private number(label: string): number {
    const known = this.numbers.get(label);
    if (known !== undefined) return known;
    this.numbers.set(label, this.labels.length);
    return this.labels.push(label) - 1;
  }
}

/** Lines of a part, and how many there are: the list may grow. */
type Chosen = readonly [Part, number[] | Numbers, number];

/** Lines that have been chosen of several parts. */
class ChosenRows implements Rows {
  readonly length: number;

  constructor(
    private readonly chosen: readonly Chosen[],
    private readonly shown: (part: Part, line: number) => string,
  ) {
    this.length = chosen.reduce((sum, [, , count]) => sum + count, 0);
  }

  slice(from: number, to: number): string[] {
    const rows: string[] = [];
    let before = 0;
    for (const [part, lines, count] of this.chosen) {
      const last = Math.min(count, to - before);
      for (let index = Math.max(0, from - before); index < last; index++) rows.push(this.shown(part, lines.at(index) ?? 0));
      before += count;
    }
    return rows;
  }
}

function emptyPart(ofAll: boolean): Part {
  return { ofAll, text: "", taken: 0, whole: 0, starts: new Numbers(), labels: new Numbers() };
}

/** Where the line begins that has not ended. */
function endOfWhole({ taken, whole, starts }: Part): number {
  return starts.length > whole ? starts.at(whole) : taken;
}

/** Whether a text goes on where this output has ended. */
function isLonger(text: string, part: Part): boolean {
  return text.startsWith(part.text.slice(0, endOfWhole(part)));
}

function rowAt({ text, taken, starts }: Part, line: number): string {
  const next = line + 1 < starts.length ? starts.at(line + 1) : taken;
  return text.slice(starts.at(line), text[next - 1] === "\n" ? next - 1 : next);
}

function textAt(part: Part, line: number): string {
  const row = rowAt(part, line);
  return part.ofAll ? settled(row) : coloredTextOf(row);
}
