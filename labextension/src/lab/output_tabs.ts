/**
 * A cell's output by rank: tabs "all", "0", "1", ... above the output of a cell that ran on several ranks.
 *
 * "all" is the output as it is saved; a rank's tab shows the lines whose label names it. Nothing in the notebook changes,
 * and saved output becomes text, never HTML.
 */

import { make, option, write } from "../words";
import type { Cell, Outputs } from "./jupyter";
import { linesOf, ranksOf, type Line } from "./rank_lines";
import { ALL_TAB, COPIED, COPY, lineCount, NO_LINES, OUTPUT_BY_RANK, SEARCH } from "./strings";

const PAUSE = 250; // milliseconds between two looks at output that grows
const SLICE = 1_000_000; // characters that are taken apart at a time
const BLOCK = 200; // lines that the page lays out together, when they come into view
const MOST_TABS = 16; // with more ranks the tabs are a menu

export class OutputTabs {
  private readonly bar = make("div", "tabs");
  private readonly tabs = make("div", "tab-list");
  private readonly menu = make("select", "tab-menu");
  private readonly search = make("input", "tab-search");
  private readonly copy = make("button", "tab-copy", COPY);
  private readonly count = make("span", "tab-count");
  private readonly view = make("div", "tab-view");
  private ranks: number[] = [];
  private readonly seen = new Map<string, number[]>(); // what labels mean
  private lines: Line[] = [];
  private chosen: number | null = null;
  private due = 0;

  constructor(
    private readonly cell: Cell,
    private readonly outputs: Outputs,
    private readonly isOnRanks: () => boolean,
  ) {
    this.tabs.setAttribute("role", "tablist");
    this.tabs.setAttribute("aria-label", OUTPUT_BY_RANK);
    this.tabs.addEventListener("keydown", this.onKey);
    this.menu.setAttribute("aria-label", OUTPUT_BY_RANK);
    this.menu.addEventListener("change", () => {
      this.choose(this.menu.value === "" ? null : Number(this.menu.value));
    });
    this.search.type = "search";
    this.search.placeholder = SEARCH;
    this.search.setAttribute("aria-label", SEARCH);
    this.search.addEventListener("input", this.draw);
    this.copy.addEventListener("click", () => void this.copyLines());
    this.view.tabIndex = 0;
    this.view.setAttribute("role", "tabpanel");
    for (const type of ["keydown", "mousedown"]) {
      this.bar.addEventListener(type, (event) => {
        event.stopPropagation(); // keys and clicks are ours, not the notebook's
      });
    }
    this.bar.append(this.tabs, this.menu, this.search, this.count, this.copy);
    outputs.changed.connect(this.later);
    cell.disposed.connect(() => {
      window.clearTimeout(this.due);
    });
    this.later();
  }

  /** Look again, soon: output may come in thousands of pieces. */
  readonly later = (): void => {
    if (this.due !== 0) return;
    this.due = window.setTimeout(() => void this.look(), PAUSE);
  };

  private async look(): Promise<void> {
    const lines: Line[] = [];
    if (this.isOnRanks()) {
      for (const text of this.texts()) {
        for (let from = 0; from < text.length; ) {
          const end = from + SLICE < text.length ? text.indexOf("\n", from + SLICE) + 1 || text.length : text.length;
          for (const line of linesOf(text.slice(from, end))) lines.push(line);
          from = end;
          if (from < text.length) await new Promise((resolve) => setTimeout(resolve)); // the page is the reader's
        }
      }
    }
    this.due = 0;
    if (this.cell.isDisposed) return;
    this.lines = lines;
    this.arrange();
  }

  /** The text of streams and values. */
  private *texts(): Generator<string> {
    for (let index = 0; index < this.outputs.length; index++) {
      const { data } = this.outputs.get(index);
      const text = data["application/vnd.jupyter.stdout"] ?? data["application/vnd.jupyter.stderr"] ?? data["text/plain"];
      if (typeof text === "string") yield text;
    }
  }

  private arrange(): void {
    for (const [label] of this.lines) if (label !== "" && !this.seen.has(label)) this.seen.set(label, ranksOf(label));
    const present = new Set(this.lines.flatMap(([label]) => (label === "" ? [] : [label])));
    const ranks = [...new Set([...present].flatMap((label) => this.seen.get(label) ?? []))].sort((one, other) => one - other);
    const wanted = ranks.length > 1;
    const wrapper = this.cell.node.querySelector<HTMLElement>(".jp-Cell-outputWrapper");
    if (wrapper === null) return;
    if (wanted && this.bar.parentElement !== wrapper) wrapper.append(this.bar, this.view);
    if (!wanted) {
      this.bar.remove();
      this.view.remove();
    }
    wrapper.classList.toggle("nbdist-has-tabs", wanted);
    if (ranks.join() !== this.ranks.join()) {
      this.ranks = ranks;
      this.drawTabs();
    }
    if (!wanted || (this.chosen !== null && !ranks.includes(this.chosen))) this.chosen = null;
    this.draw();
  }

  private drawTabs(): void {
    const many = this.ranks.length > MOST_TABS;
    this.tabs.hidden = many;
    this.menu.hidden = !many;
    const names: [number | null, string][] = [[null, ALL_TAB], ...this.ranks.map((rank): [number, string] => [rank, `${rank}`])];
    this.menu.replaceChildren(...names.map(([rank, name]) => option(rank === null ? "" : `${rank}`, name)));
    this.tabs.replaceChildren(
      ...(many ? [] : names).map(([rank, name]) => {
        const tab = make("button", "tab", name);
        tab.setAttribute("role", "tab");
        tab.dataset["rank"] = rank === null ? "" : `${rank}`;
        tab.addEventListener("click", () => {
          this.choose(rank);
        });
        return tab;
      }),
    );
  }

  private choose(rank: number | null): void {
    this.chosen = rank;
    this.search.value = "";
    this.draw();
  }

  private readonly onKey = (event: KeyboardEvent): void => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const all = [null, ...this.ranks];
    const next = all[Math.max(0, Math.min(all.length - 1, all.indexOf(this.chosen) + step))];
    this.choose(next ?? null);
    this.tabs.querySelector<HTMLElement>('[aria-selected="true"]')?.focus();
  };

  /** The chosen rank's lines that contain what is searched. */
  private get shown(): string[] {
    const rank = this.chosen;
    const words = this.search.value.toLowerCase();
    const labels = new Set([...this.seen].filter(([, ranks]) => rank !== null && ranks.includes(rank)).map(([label]) => label));
    const lines = this.lines.filter(([label, text]) => labels.has(label) && (words === "" || text.toLowerCase().includes(words)));
    return lines.map(([, text]) => text);
  }

  private readonly draw = (): void => {
    const name = this.chosen === null ? "" : `${this.chosen}`;
    for (const tab of this.tabs.children) {
      const selected = (tab as HTMLElement).dataset["rank"] === name;
      tab.setAttribute("aria-selected", `${selected}`);
      (tab as HTMLElement).tabIndex = selected ? 0 : -1;
    }
    this.menu.value = name;
    const byRank = this.chosen !== null;
    this.bar.parentElement?.classList.toggle("nbdist-by-rank", byRank);
    for (const element of [this.search, this.copy, this.count]) element.hidden = !byRank;
    this.view.hidden = !byRank;
    if (!byRank) {
      this.view.replaceChildren();
      return;
    }
    const lines = this.shown;
    write(this.count, lineCount(lines.length));
    const blocks = Array.from({ length: Math.ceil(lines.length / BLOCK) }, (_, index) => lines.slice(index * BLOCK, (index + 1) * BLOCK));
    blocks.forEach((block, index) => {
      const element = this.view.children[index] ?? this.view.appendChild(make("pre", "tab-block"));
      write(element, block.join("\n"));
      (element as HTMLElement).style.setProperty("--lines", `${block.length}`);
    });
    while (this.view.children.length > blocks.length) this.view.lastElementChild?.remove();
    if (blocks.length === 0) this.view.append(make("pre", "tab-block", NO_LINES));
  };

  private async copyLines(): Promise<void> {
    await navigator.clipboard.writeText(this.shown.join("\n"));
    write(this.copy, COPIED);
    window.setTimeout(() => {
      write(this.copy, COPY);
    }, 1500);
  }
}
