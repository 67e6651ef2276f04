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
import type { BarsNews, CellRan } from "../generated/wire";
import { ranksOf, shownOf } from "./rank_lines";
import { RankText, type Output, type Rows } from "./rank_text";
import { Batch } from "./slices";
import { gapAfter, runShown, tabBeside } from "./tab_choice";
import { StandIn } from "./stand_in";
import * as words from "./strings";

const PAUSE = 250; // milliseconds between two looks at output that grows
const looks = new Batch(PAUSE);
const ERROR = "application/vnd.jupyter.error"; // JupyterLab's own types: an error as it is saved, and its text
const ERROR_TEXT = "application/vnd.jupyter.stderr";
const MOST_BARS = 5000; // of a rank that are kept, of which most have been drawn over
const MOST_TABS = 16; // with more ranks the tabs are a menu

export class OutputTabs {
  private readonly bar = make("div", "tabs");
  private readonly tabs = make("div", "tab-list");
  private readonly menu = make("select", "tab-menu");
  private readonly menuLater = new StandIn("tab-menu", () => this.menu);
  private readonly note = make("span", "tab-note");
  private readonly search = make("input", "tab-search");
  private readonly searchLater = new StandIn(
    "tab-search",
    () => this.search,
    () => this.search.value === "",
  );
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
  private drawnTabs = "";
  private ran: CellRan | null = null; // what the kernel has told of the run that is shown
  private chosen: number | null = null; // stays while the cell runs again and has not printed
  private looked: number | null = null; // the rank whose bars the kernel tells
  private bars = new Map<string, string>();
  private due = false;
  private changed = false; // since the last look began
  private gap = ""; // what to say of a connection that was closed while the cell ran

  constructor(
    private readonly cell: Cell,
    private readonly outputs: Outputs,
    private readonly isOnRanks: () => boolean,
    private readonly link: Link,
    private readonly copyText: (text: string) => void,
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
    const { button } = this.searchLater;
    write(button, words.SEARCH);
    const tools = make("span", "tab-tools", button, this.count, this.differ, this.follow, this.copy, this.download);
    tools.append(this.log.element);
    this.note.setAttribute("role", "status");
    this.bar.append(this.note, tools);
    outputs.changed.connect(this.outputsChanged);
    const unwatch = link.watch(() => {
      this.drawNote();
      this.log.offer();
      if (this.run !== this.ran) this.later();
    });
    cell.disposed.connect(() => {
      unwatch();
      this.lookAt(null);
      this.list.dispose();
    });
    this.later();
  }

  /** Output of a cell that runs is old where the page has lost its server. A cell has a number unless it runs. */
  private readonly drawNote = (): void => {
    const runs = this.cell.model.executionCount === null;
    this.gap = gapAfter(this.gap, this.link, runs, this.outputs.length > 0);
    const old = runs && this.link.cut;
    write(this.note, old ? words.CUT_OUTPUT : this.gap || (this.isCutOff ? words.CUT_OFF : ""));
    this.note.title = old ? words.CUT : this.gap === words.GAP ? words.GAP_CAPTION : "";
  };

  /** Whether the page was opened while the cell ran: JupyterLab shows nothing of what the cell prints from then on. */
  private get isCutOff(): boolean {
    const { executionCount, executionState } = this.cell.model;
    const ranks = this.link.state?.ranks ?? 0;
    return this.link.cameLate && ranks > 0 && executionCount === null && executionState === "idle" && this.outputs.length > 0;
  }

  private readonly outputsChanged = (): void => {
    if (this.outputs.length === 0) {
      this.gap = ""; // the cell runs again
      this.ran = null;
      this.log.close();
    }
    this.later();
  };

  /** What the kernel has told of the run that is shown. It outlives the kernel, as the output does. */
  private get run(): CellRan | null {
    const { executionCount, sharedModel } = this.cell.model;
    return runShown([this.link.ran.get(sharedModel.getId()) ?? null, this.ran], executionCount);
  }

  private lookAt(rank: number | null): void {
    if (rank === this.looked) return;
    this.looked = rank;
    this.bars = new Map();
    this.text.takeBars(this.bars);
    this.link.look(this.cell.model.sharedModel.getId(), rank, this.takeBars);
  }

  /** Each line comes before the output has it. */
  private readonly takeBars = ({ rank, bars, whole }: BarsNews): void => {
    for (const [line, own] of Object.entries(bars)) this.bars.set(shownOf(line).trimEnd(), own);
    if (this.bars.size > MOST_BARS) {
      this.lookAt(null);
      this.lookAt(rank);
    } else if (whole) {
      this.text.takeBars(this.bars);
      this.redraw();
    }
  };

  /** Look again, soon: output may come in thousands of pieces. */
  readonly later = (): void => {
    this.changed = true;
    if (this.due) return;
    this.due = true;
    looks.add(async () => {
      if (!this.cell.isDisposed) await this.look();
    });
  };

  private async look(): Promise<void> {
    this.changed = false;
    this.ran = this.run;
    try {
      await this.text.take(this.isOnRanks() ? this.texts() : [], ranksOf(this.ran?.ranks ?? ""));
      if (!this.cell.isDisposed) await this.arrange();
    } finally {
      this.due = false;
    }
    if (this.wasChanged() && !this.cell.isDisposed) this.later(); // more has come meanwhile
  }

  private wasChanged(): boolean {
    return this.changed;
  }

  /** The text of streams, values and errors. An error has no field that says whose it is, so all ranks have it. */
  private *texts(): Generator<Output> {
    for (let index = 0; index < this.outputs.length; index++) {
      const { data, streamText } = this.outputs.get(index);
      streamText?.changed.connect(this.later); // a signal takes the same slot once
      const ofAll = ERROR in data;
      const text = streamText?.text ?? data[ofAll ? ERROR_TEXT : "text/plain"];
      if (typeof text === "string") yield { text, ofAll };
    }
  }

  /** Whether there are ranks to choose from. */
  private get hasTabs(): boolean {
    return this.text.several || (this.failed !== "" && this.outputs.length > 0 && this.text.ranks.length > 1);
  }

  /** The ranks that failed, as far as they are known. */
  private get failed(): string {
    return this.ran?.failed ?? "";
  }

  /** The rank whose lines are shown; null: those of all. */
  private get rank(): number | null {
    return this.hasTabs && this.chosen !== null && this.text.ranks.includes(this.chosen) ? this.chosen : null;
  }

  private async arrange(): Promise<void> {
    const { hasTabs } = this;
    const { ranks } = this.text;
    const wrapper = this.cell.node.querySelector<HTMLElement>(".jp-Cell-outputWrapper");
    if (wrapper === null) return;
    if (hasTabs && this.bar.parentElement !== wrapper) wrapper.append(this.bar);
    if (!hasTabs) {
      this.bar.remove();
      this.view.remove();
    }
    wrapper.classList.toggle("nbdist-has-tabs", hasTabs);
    this.drawNote(); // the link may have nothing more to tell
    if (!hasTabs) wrapper.classList.remove("nbdist-by-rank"); // else nobody would see the output
    const { failed } = this;
    if (`${ranks.join()} ${failed}` !== this.drawnTabs) {
      this.drawnTabs = `${ranks.join()} ${failed}`;
      this.drawTabs(new Set(ranksOf(failed)));
    }
    await this.draw();
  }

  private drawTabs(failed: ReadonlySet<number>): void {
    const { ranks } = this.text;
    const many = ranks.length > MOST_TABS;
    for (const element of [this.tabs, this.menu, this.menuLater.button]) element.remove();
    this.bar.prepend(many ? this.menuLater.button : this.tabs);
    if (many) {
      const names = ranks.map((rank) => option(`${rank}`, failed.has(rank) ? words.failedName(rank) : `${rank}`));
      this.menu.replaceChildren(option("", words.ALL_TAB), ...names);
    } else {
      this.tabs.replaceChildren(...[null, ...ranks].map((rank) => this.tab(rank, rank !== null && failed.has(rank))));
    }
  }

  private tab(rank: number | null, failed: boolean): HTMLElement {
    const tab = make("button", "tab", rank === null ? words.ALL_TAB : `${rank}`);
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-label", rank === null ? words.ALL_RANKS : words.ofRank(rank, failed));
    tab.dataset["rank"] = rank === null ? "" : `${rank}`;
    if (failed) {
      tab.classList.add("nbdist-failed");
      tab.title = words.ofRank(rank ?? 0, failed);
    }
    tab.addEventListener("click", () => {
      this.choose(rank);
    });
    return tab;
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
    this.choose(tabBeside(this.text.ranks, this.rank, step));
    this.tabs.querySelector<HTMLElement>('[aria-selected="true"]')?.focus();
  };

  private get differing(): boolean {
    return this.differ.getAttribute("aria-pressed") === "true";
  }

  /** The lines that are wanted: of the chosen rank, with what is searched. Null: others are wanted by now. */
  private async wanted(): Promise<Rows | null> {
    const words = this.search.value;
    if (this.log.open) return this.log.find(words);
    return this.text.find({ rank: this.rank, words, differ: this.differing });
  }

  private async wantedText(): Promise<string> {
    const rows = (await this.wanted()) ?? [];
    this.redraw(); // what was being looked for to be shown has been called off
    return rows.slice(0, rows.length).map(shownOf).join("\n");
  }

  private readonly redraw = (): void => {
    void this.draw();
  };

  private async draw(): Promise<void> {
    const drawing = ++this.drawings;
    const { rank } = this;
    this.lookAt(rank);
    const name = rank === null ? "" : `${rank}`;
    for (const tab of this.tabs.children) {
      const selected = (tab as HTMLElement).dataset["rank"] === name;
      tab.setAttribute("aria-selected", `${selected}`);
      (tab as HTMLElement).tabIndex = selected ? 0 : -1;
    }
    this.menu.value = name;
    const shown = this.menu.selectedOptions[0]?.text ?? "";
    write(this.menuLater.button, shown);
    this.menuLater.button.setAttribute("aria-label", words.outputOf(shown));
    const asList = this.hasTabs && (rank !== null || this.search.value !== "" || this.differing);
    this.bar.parentElement?.classList.toggle("nbdist-by-rank", asList);
    for (const element of [this.follow, this.count]) element.hidden = !asList;
    if (!asList) this.view.remove();
    else if (!this.view.isConnected) this.bar.after(this.view);
    this.differ.hidden = this.log.open;
    const { executionCount, sharedModel } = this.cell.model;
    this.log.draw(rank, executionCount ?? 0, sharedModel.getId(), sharedModel.getSource());
    if (!asList) {
      this.offerLines(true);
      this.list.show([]);
      return;
    }
    const rows = await this.wanted();
    if (rows === null || drawing !== this.drawings) return;
    this.view.setAttribute("aria-label", rank === null ? words.ALL_RANKS : words.onRanks(name));
    write(this.count, words.lineCount(rows.length));
    this.offerLines(rows.length > 0);
    const searched = this.search.value !== "" || (this.differing && !this.log.open);
    this.list.show(rows.length > 0 ? rows : [searched ? words.NO_LINES : words.NOTHING_PRINTED]);
  }

  /** @param any - Whether there are lines to take along. */
  private offerLines(any: boolean): void {
    this.copy.disabled = !any;
    this.download.disabled = !any;
  }

  private async downloadLines(): Promise<void> {
    const name = this.rank === null ? "all" : `rank-${this.rank}`;
    save(`cell-${this.cell.model.executionCount ?? 0}-${name}.txt`, await this.wantedText());
  }

  private async copyLines(): Promise<void> {
    this.copyText(await this.wantedText());
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
