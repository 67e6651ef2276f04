/**
 * A rank's output from the session's log, page by page: also what the notebook does not show, because it was too much.
 */

import { make, write } from "../words";
import type { LineList } from "./line_list";
import type { Link, Outcome } from "./link";
import { rowsOf } from "./rank_lines";
import type { Rows } from "./rank_text";
import { EARLIER, LATER, LOG, LOG_CAPTION, logPage } from "./strings";

const PAUSE = 300; // milliseconds without a key before the log is searched

/** What is read at a time. */
export interface Page {
  rows: string[];
  /** Where the next one begins; null: it is the last. */
  next: number | null;
}

/**
 * Read a page, or search from there on: the kernel searches for some seconds at a time.
 *
 * @param isWanted - Whether the reader still waits for it.
 * @returns null if not.
 */
export async function readPage(
  ask: (position: number) => Promise<Outcome>,
  position: number,
  searches: boolean,
  isWanted: () => boolean,
): Promise<Page | null> {
  for (;;) {
    const { text, failed, log } = await ask(position);
    if (!isWanted()) return null;
    const rows = rowsOf(failed ? text : (log?.text ?? ""));
    const next = log?.next ?? null;
    if (!searches || rows.length > 0 || next === null) return { rows, next };
    position = next;
  }
}

export class LogPages {
  readonly element = make("span", "log-pages");
  /** Whether the log is shown. */
  open = false;
  private readonly toggle = make("button", "tab-tool", LOG);
  private readonly earlier = make("button", "tab-tool", EARLIER);
  private readonly later = make("button", "tab-tool", LATER);
  private readonly place = make("span", "tab-count");
  private rank: number | null = null;
  private cell = 0;
  private id = "";
  private code = "";
  private rows: string[] = [];
  private begins = [0]; // positions of the pages so far, the one in view last
  private next: number | null = null;
  private words = ""; // that are searched
  private asked = 0; // how often the kernel was, or would have been

  constructor(
    private readonly link: Link,
    private readonly list: LineList,
    private readonly onChange: () => void,
  ) {
    this.toggle.title = LOG_CAPTION;
    this.toggle.addEventListener("click", () => {
      if (this.open) this.close();
      else void this.read([0]);
    });
    this.earlier.addEventListener("click", () => void this.read(this.begins.slice(0, -1)));
    this.later.addEventListener("click", () => {
      if (this.next !== null) void this.read([...this.begins, this.next]);
    });
  }

  /**
   * @param cell - Its number in the notebook; 0: the page does not know it, as while it runs.
   * @param id - Its id, by which the kernel knows it if it has run it.
   * @param code - Its text: after a restart of the kernel another cell may have its number.
   */
  draw(rank: number | null, cell: number, id: string, code: string): void {
    if (rank !== this.rank) this.asked++;
    this.rank = rank;
    this.cell = cell;
    this.id = id;
    this.code = code;
    this.offer();
    this.toggle.setAttribute("aria-pressed", `${this.open}`);
    for (const element of [this.earlier, this.later, this.place]) element.hidden = !this.open;
    this.earlier.disabled = this.begins.length < 2;
    this.later.disabled = this.next === null;
    write(this.place, logPage(this.begins.length, this.next !== null));
  }

  /** Show the button if there are ranks, which may come later than the cell's output. */
  offer(): void {
    const there = this.rank !== null && (this.link.state?.ranks ?? 0) > 0;
    this.element.hidden = !there && !this.open;
    // Not before: a notebook has hundreds.
    if (there && !this.toggle.isConnected) this.element.append(this.toggle, this.earlier, this.place, this.later);
  }

  close(): void {
    if (!this.open) return;
    this.open = false;
    this.asked++;
    this.words = "";
    this.rows = [];
    this.list.follow = true;
    this.onChange();
  }

  /** The lines of the page: all, or those of the whole log with these words. Null: they are on their way. */
  async find(words: string): Promise<Rows | null> {
    if (words === this.words) return this.rows;
    this.words = words;
    const asked = ++this.asked;
    await new Promise((resolve) => setTimeout(resolve, PAUSE));
    if (asked === this.asked) await this.read([0]);
    return null;
  }

  private async read(begins: number[]): Promise<void> {
    const { rank, words } = this;
    const asked = ++this.asked;
    const ask = (position: number): Promise<Outcome> => {
      const { cell, id: id_of_cell, code } = this;
      return this.link.ask({ do: "log", ranks: `${rank ?? ""}`, cell, id_of_cell, code, position, words });
    };
    const page = await readPage(ask, begins.at(-1) ?? 0, words !== "", () => asked === this.asked);
    if (page === null) return; // the reader has gone on
    this.rows = page.rows;
    this.next = page.next;
    this.open = true;
    this.begins = begins;
    this.list.follow = false;
    this.list.element.scrollTop = 0;
    this.onChange();
  }
}
