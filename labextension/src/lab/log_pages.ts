/**
 * A rank's output from the session's log, page by page: also what the notebook does not show, because it was too much.
 */

import { make, write } from "../words";
import type { LineList } from "./line_list";
import type { Link } from "./link";
import { rowsOf } from "./rank_lines";
import { EARLIER, LATER, LOG, LOG_CAPTION, logPage } from "./strings";

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
  private rows: string[] = [];
  private begins = [0]; // positions of the pages so far, the one in view last
  private next: number | null = null;

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
    this.element.append(this.toggle, this.earlier, this.place, this.later);
  }

  /** @param cell - Its number in the notebook. */
  draw(rank: number | null, cell: number): void {
    this.rank = rank;
    this.cell = cell;
    const there = rank !== null && cell > 0 && (this.link.state?.ranks ?? 0) > 0;
    this.element.hidden = !there && !this.open;
    this.toggle.setAttribute("aria-pressed", `${this.open}`);
    for (const element of [this.earlier, this.later, this.place]) element.hidden = !this.open;
    this.earlier.disabled = this.begins.length < 2;
    this.later.disabled = this.next === null;
    write(this.place, logPage(this.begins.length, this.next !== null));
  }

  close(): void {
    if (!this.open) return;
    this.open = false;
    this.rows = [];
    this.list.follow = true;
    this.onChange();
  }

  /** The page's lines with these words. */
  lines(words: string): string[] {
    const lower = words.toLowerCase();
    return lower === "" ? this.rows : this.rows.filter((row) => row.toLowerCase().includes(lower));
  }

  private async read(begins: number[]): Promise<void> {
    const { rank } = this;
    const { text, failed, log } = await this.link.ask({ do: "log", ranks: `${rank ?? ""}`, cell: this.cell, position: begins.at(-1) ?? 0 });
    if (rank !== this.rank) return; // the reader has gone on
    this.open = true;
    this.begins = begins;
    this.next = log?.next ?? null;
    this.rows = rowsOf(failed ? text : (log?.text ?? ""));
    this.list.follow = false;
    this.list.element.scrollTop = 0;
    this.onChange();
  }
}
