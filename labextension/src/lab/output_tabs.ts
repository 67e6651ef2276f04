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
const SLICE = 100_000; // characters that are taken apart at a time
const BLOCK = 200; // lines that the page lays out together, when they come into view
const MOST_TABS = 16; // with more ranks the tabs are a menu

/** One output, as far as it is taken apart. */
interface Part {
  text: string; // its whole lines
  whole: number; // how many these are
  lines: Line[]; // and the one that has begun
  labels: Set<string>;
}

export class OutputTabs {
  private readonly bar = make("div", "tabs");
  private readonly tabs = make("div", "tab-list");
  private readonly menu = make("select", "tab-menu");
  private readonly search = make("input", "tab-search");
  private readonly copy = make("button", "tab-copy", COPY);
  private readonly count = make("span", "tab-count");
  private readonly view = make("div", "tab-view");
  private ranks: number[] = [];
  private seen = new Map<string, number[]>(); // which ranks a label names
  private parts: Part[] = [];
  private chosen: number | null = null;
  private due = 0;
  private changed = false; // since the last look began

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
    this.changed = true;
    if (this.due !== 0) return;
    this.due = window.setTimeout(() => void this.look(), PAUSE);
  };

  private async look(): Promise<void> {
    const parts: Part[] = [];
    this.changed = false;
    if (this.isOnRanks()) {
      for (const text of this.texts()) parts.push(await taken(text, this.parts[parts.length]));
    }
    this.due = 0;
    if (this.cell.isDisposed) return;
    if (this.wasChanged()) this.later(); // more has come meanwhile
    this.parts = parts;
    this.arrange();
  }

  private wasChanged(): boolean {
    return this.changed;
  }

  /** The text of streams and values. */
  private *texts(): Generator<string> {
    for (let index = 0; index < this.outputs.length; index++) {
      const { data, streamText } = this.outputs.get(index);
      streamText?.changed.connect(this.later); // a signal takes the same slot once
      const text = streamText?.text ?? data["text/plain"];
      if (typeof text === "string") yield text;
    }
  }

  private arrange(): void {
    this.seen = new Map(this.parts.flatMap(({ labels }) => [...labels].map((label): [string, number[]] => [label, ranksOf(label)])));
    const ranks = [...new Set([...this.seen.values()].flat())].sort((one, other) => one - other);
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
    const found: string[] = [];
    for (const { lines } of this.parts) {
      for (const [label, text] of lines) if (labels.has(label) && (words === "" || text.toLowerCase().includes(words))) found.push(text);
    }
    return found;
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
