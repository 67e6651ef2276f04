/**
 * A cell's output by rank: tabs "all", "0", "1", ... above the output of a cell that ran on several ranks.
 *
 * "all" is the output as it is saved; a rank's tab shows the lines whose label names it. Nothing in the notebook changes,
 * and saved output becomes text, never HTML.
 */

import { make, option, write } from "../words";
import type { Cell, Outputs } from "./jupyter";
import { LineList } from "./line_list";
import type { Link } from "./link";
import { LogPages } from "./log_pages";
import { RankText, type Rows } from "./rank_text";
import * as words from "./strings";

const PAUSE = 250; // milliseconds between two looks at output that grows
const MOST_TABS = 16; // with more ranks the tabs are a menu

export class OutputTabs {
  private readonly bar = make("div", "tabs");
  private readonly tabs = make("div", "tab-list");
  private readonly menu = make("select", "tab-menu");
  private readonly note = make("span", "tab-note");
  private readonly search = make("input", "tab-search");
  private readonly count = make("span", "tab-count");
  private readonly differ = tool(words.DIFFER, words.DIFFER_CAPTION);
  private readonly follow = tool(words.FOLLOW, words.FOLLOW_CAPTION);
  private readonly copy = tool(words.COPY, words.COPY_CAPTION);
  private readonly download = tool(words.DOWNLOAD, words.DOWNLOAD_CAPTION);
  private readonly list = new LineList(() => {
    this.follow.setAttribute("aria-pressed", `${this.list.follow}`);
  });
  private readonly log: LogPages;
  private readonly view = make("div", "tab-view");
  private readonly text = new RankText();
  private drawings = 0;
  private drawnRanks = "";
  private chosen: number | null = null;
  private due = 0;
  private changed = false; // since the last look began
  private gap = false; // whether the connection was closed while the cell ran

  constructor(
    private readonly cell: Cell,
    private readonly outputs: Outputs,
    private readonly isOnRanks: () => boolean,
    private readonly link: Link,
  ) {
    this.log = new LogPages(link, this.list, this.redraw);
    this.tabs.setAttribute("role", "tablist");
    this.tabs.setAttribute("aria-label", words.OUTPUT_BY_RANK);
    this.tabs.addEventListener("keydown", this.onKey);
    this.menu.setAttribute("aria-label", words.OUTPUT_BY_RANK);
    this.menu.addEventListener("change", () => {
      this.choose(this.menu.value === "" ? null : Number(this.menu.value));
    });
    this.search.type = "search";
    this.search.placeholder = words.SEARCH;
    this.search.setAttribute("aria-label", words.SEARCH);
    this.search.addEventListener("input", this.redraw);
    this.differ.setAttribute("aria-pressed", "false");
    this.follow.setAttribute("aria-pressed", "true");
    this.differ.addEventListener("click", () => {
      this.differ.setAttribute("aria-pressed", `${!this.differing}`);
      this.redraw();
    });
    this.follow.addEventListener("click", () => {
      this.list.follow = !this.list.follow;
    });
    this.copy.addEventListener("click", () => void this.copyLines());
    this.download.addEventListener("click", () => void this.downloadLines());
    this.view.setAttribute("role", "tabpanel");
    this.view.append(this.list.element);
    for (const type of ["keydown", "mousedown"]) {
      this.bar.addEventListener(type, (event) => {
        event.stopPropagation(); // keys and clicks are ours, not the notebook's
      });
    }
    const tools = make("span", "tab-tools", this.search, this.count, this.differ, this.follow, this.copy, this.download);
    tools.append(this.log.element);
    this.note.setAttribute("role", "status");
    this.bar.append(this.tabs, this.menu, this.note, tools);
    outputs.changed.connect(this.outputsChanged);
    const unwatch = link.watch(this.drawNote);
    cell.disposed.connect(() => {
      unwatch();
      window.clearTimeout(this.due);
      this.list.dispose();
    });
    this.later();
  }

  /** Output of a cell that runs is old where the page has lost its server. A cell has a number unless it runs. */
  private readonly drawNote = (): void => {
    const { cut, closed } = this.link;
    const runs = this.cell.model.executionCount === null;
    this.gap ||= runs && closed;
    const old = runs && cut;
    write(this.note, old ? words.CUT_OUTPUT : this.gap ? words.GAP : "");
    this.note.title = old ? words.CUT : this.gap ? words.GAP_CAPTION : "";
  };

  private readonly outputsChanged = (): void => {
    if (this.outputs.length === 0) this.gap = false; // the cell runs again
    this.later();
  };

  /** Look again, soon: output may come in thousands of pieces. */
  readonly later = (): void => {
    this.changed = true;
    if (this.due !== 0) return;
    this.due = window.setTimeout(() => void this.look(), PAUSE);
  };

  private async look(): Promise<void> {
    this.changed = false;
    await this.text.take(this.isOnRanks() ? this.texts() : []);
    if (!this.cell.isDisposed) await this.arrange();
    this.due = 0;
    if (this.wasChanged() && !this.cell.isDisposed) this.later(); // more has come meanwhile
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

  private async arrange(): Promise<void> {
    const { ranks } = this.text;
    const wanted = ranks.length > 1;
    const wrapper = this.cell.node.querySelector<HTMLElement>(".jp-Cell-outputWrapper");
    if (wrapper === null) return;
    if (wanted && this.bar.parentElement !== wrapper) wrapper.append(this.bar, this.view);
    if (!wanted) {
      this.bar.remove();
      this.view.remove();
    }
    wrapper.classList.toggle("nbdist-has-tabs", wanted);
    if (ranks.join() !== this.drawnRanks) {
      this.drawnRanks = ranks.join();
      this.drawTabs();
    }
    if (!wanted || (this.chosen !== null && !ranks.includes(this.chosen))) this.chosen = null;
    await this.draw();
  }

  private drawTabs(): void {
    const { ranks } = this.text;
    const many = ranks.length > MOST_TABS;
    this.tabs.hidden = many;
    this.menu.hidden = !many;
    const names: [number | null, string][] = [[null, words.ALL_TAB], ...ranks.map((rank): [number, string] => [rank, `${rank}`])];
    this.menu.replaceChildren(...names.map(([rank, name]) => option(rank === null ? "" : `${rank}`, name)));
    this.tabs.replaceChildren(
      ...(many ? [] : names).map(([rank, name]) => {
        const tab = make("button", "tab", name);
        tab.setAttribute("role", "tab");
        tab.setAttribute("aria-label", rank === null ? words.ALL_RANKS : words.onRanks(name));
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
    this.log.close();
    this.redraw();
  }

  private readonly onKey = (event: KeyboardEvent): void => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const all = [null, ...this.text.ranks];
    const next = all[Math.max(0, Math.min(all.length - 1, all.indexOf(this.chosen) + step))];
    this.choose(next ?? null);
    this.tabs.querySelector<HTMLElement>('[aria-selected="true"]')?.focus();
  };

  private get differing(): boolean {
    return this.differ.getAttribute("aria-pressed") === "true";
  }

  /** The lines that are wanted: of the chosen rank, with what is searched. Null: others are wanted by now. */
  private async wanted(): Promise<Rows | null> {
    const words = this.search.value;
    if (this.log.open) return this.log.find(words);
    return this.text.find({ rank: this.chosen, words, differ: this.differing });
  }

  private async wantedText(): Promise<string> {
    const rows = (await this.wanted()) ?? [];
    this.redraw(); // what was being looked for to be shown has been called off
    return rows.slice(0, rows.length).join("\n");
  }

  private readonly redraw = (): void => {
    void this.draw();
  };

  private async draw(): Promise<void> {
    const drawing = ++this.drawings;
    const name = this.chosen === null ? "" : `${this.chosen}`;
    for (const tab of this.tabs.children) {
      const selected = (tab as HTMLElement).dataset["rank"] === name;
      tab.setAttribute("aria-selected", `${selected}`);
      (tab as HTMLElement).tabIndex = selected ? 0 : -1;
    }
    this.menu.value = name;
    const asList = this.chosen !== null || this.search.value !== "" || this.differing;
    this.bar.parentElement?.classList.toggle("nbdist-by-rank", asList);
    for (const element of [this.follow, this.count, this.view]) element.hidden = !asList;
    this.differ.hidden = this.log.open;
    this.log.draw(this.chosen, this.cell.model.executionCount ?? 0);
    if (!asList) {
      this.list.show([]);
      return;
    }
    const rows = await this.wanted();
    if (rows === null || drawing !== this.drawings) return;
    this.view.setAttribute("aria-label", this.chosen === null ? words.ALL_RANKS : words.onRanks(name));
    write(this.count, words.lineCount(rows.length));
    this.list.show(rows.length > 0 ? rows : [words.NO_LINES]);
  }

  private async downloadLines(): Promise<void> {
    const name = this.chosen === null ? "all" : `rank-${this.chosen}`;
    save(`cell-${this.cell.model.executionCount ?? 0}-${name}.txt`, await this.wantedText());
  }

  private async copyLines(): Promise<void> {
    await navigator.clipboard.writeText(await this.wantedText());
    write(this.copy, words.COPIED);
    window.setTimeout(() => {
      write(this.copy, words.COPY);
    }, 1500);
  }
}

function tool(label: string, caption: string): HTMLButtonElement {
  const button = make("button", "tab-tool", label);
  button.title = caption;
  return button;
}

/** Have the browser save a text as a file. */
function save(name: string, text: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text, "\n"], { type: "text/plain" }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}
