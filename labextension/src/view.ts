/**
 * The panel in plain DOM: whoever has an element and a way to the kernel can show it.
 *
 * Owns what the reader sees and does: rows or a map, which rank is chosen, pause. Independent of widgets.
 */

import { Cell, metricMenu, scale } from "./heat";
import { Details } from "./details";
import type { Metric, NodeRow, PanelFrame, PanelNews, PanelWish, RankRow } from "./generated/wire";
import { Header } from "./header";
import { headings, MachineBar, PARTS, Row, type Beside } from "./row";
import { held, onGpu, remarks, State, urgency } from "./state";
import * as strings from "./strings";
import { make, nameOf, partOf, percent, write } from "./words";

/** A panel in the page. */
export interface View {
  /** Show this instead of all that was there. */
  load(frame: PanelFrame): void;
  /** What came next. */
  receive(message: PanelNews): void;
  /** The kernel has been restarted: nothing comes any more. */
  lose(): void;
  /** Take it out of the page. */
  dispose(): void;
}

const ATTENTION = 5; // rows below a map
const DENSE = 256; // ranks, above which cells are small and without numbers
const IN_VIEW = 1024; // ranks that a map shows without scrolling
const UNNAMED = 4; // ranks to a machine; with less a map has no names of machines
const TICK = 1000; // milliseconds between two looks at the clock

/**
 * Show a panel.
 *
 * @param parent - Where.
 * @param send - What brings the reader's wishes to the kernel. Returns whether they hold while a cell runs, too.
 */
export function createView(parent: HTMLElement, send: (wish: PanelWish) => boolean): View {
  const view = new Panel(send);
  parent.append(view.element);
  return view;
}

class Panel implements View {
  readonly element = make("div", "panel");
  private readonly state = new State();
  private readonly header: Header;
  private readonly list = make("div", "ranks");
  private readonly legend = make("div", "legend");
  private readonly attention = make("div", "ranks nbdist-attention");
  private readonly others = make("p", "message"); // how many more there are
  private readonly details: Details;
  private readonly note = make("p", "message");
  private readonly menu: HTMLSelectElement;
  private readonly clock: number;
  private nodes: NodeLine[] = [];
  private marks: (Row | Cell)[] = [];
  private readonly attentionRows = Array.from({ length: ATTENTION }, () => new Row());
  private worthALook: number[] = []; // which ranks these rows show
  private metric: Metric = "memory";
  private chosen: number | null = null;
  private focus = 0;
  private wish: boolean | null = null; // to pause or not, as long as the kernel has not heard of it
  private layout = "";
  private median = ""; // that the map was drawn with
  private heard = Date.now();
  private lost = false;

  constructor(private readonly send: (wish: PanelWish) => boolean) {
    this.header = new Header({ pause: this.pause, rate: this.setRate, peak: this.measurePeak });
    this.details = new Details(this.snapshot, this.close);
    this.menu = metricMenu(this.show);
    this.element.append(this.header.element, this.list, this.legend, this.attention, this.details.element, this.note);
    this.list.tabIndex = -1; // it scrolls, which would make it a stop for Tab
    this.element.dataset["lmSuppressShortcuts"] = "true";
    this.note.setAttribute("role", "status");
    this.list.setAttribute("role", "listbox");
    this.list.setAttribute("aria-label", strings.ranks);
    this.list.addEventListener("click", this.onClick);
    this.list.addEventListener("keydown", this.onKey);
    this.attention.setAttribute("role", "listbox");
    this.attention.setAttribute("aria-label", strings.worthALook);
    this.attention.addEventListener("click", this.onAttention);
    this.clock = window.setInterval(this.tick, TICK);
    this.draw();
  }

  load(frame: PanelFrame): void {
    this.state.load(frame);
    this.hear();
    this.drawAll();
  }

  receive(message: PanelNews): void {
    if (message.type === "note") {
      this.say(message.text);
      return;
    }
    if (message.type === "head") this.state.hear(message.head);
    else this.state.apply(message);
    this.hear();
    if (this.wish !== true) this.draw();
  }

  lose(): void {
    this.lost = true;
    this.say(strings.runAgain);
    this.tick();
  }

  dispose(): void {
    window.clearInterval(this.clock);
    this.element.remove();
  }

  // --- what the reader does

  private readonly pause = (on: boolean): void => {
    this.wish = on; // holds at once; the kernel may hear of it when its cell has ended
    this.heard = Date.now();
    this.send({ type: "pause", value: on });
    this.draw();
  };

  private readonly setRate = (seconds: number): void => {
    const soon = this.send({ type: "rate", value: seconds }) || !this.busy;
    this.say(soon ? "" : strings.rateLater);
  };

  private readonly show = (metric: Metric): void => {
    this.metric = metric;
    this.drawLegend();
    this.send({ type: "metric", value: metric });
    this.drawAll();
  };

  private readonly measurePeak = (): void => {
    this.say(this.busy ? strings.peakLater : strings.peakRequested);
    this.send({ type: "peak" });
  };

  private readonly snapshot = (): void => {
    const rank = this.chosen === null ? undefined : this.state.ranks[this.chosen];
    if (rank === undefined) return;
    this.say(strings.snapshotRequested(nameOf(rank)) + (this.busy ? strings.snapshotLater : ""));
    this.send({ type: "snapshot", value: rank.rank });
  };

  private readonly close = (): void => {
    this.choose(null);
    this.marks[this.focus]?.element.focus();
  };

  private readonly onClick = (event: MouseEvent): void => {
    const index = this.marks.findIndex((mark) => mark.element.contains(event.target as globalThis.Node));
    if (index < 0) return;
    this.choose(index === this.chosen ? null : index);
    this.moveTo(index);
  };

  private readonly onAttention = (event: MouseEvent): void => {
    const row = this.attentionRows.findIndex((each) => each.element.contains(event.target as globalThis.Node));
    const index = this.worthALook[row];
    if (index === undefined) return;
    this.choose(index);
    this.moveTo(index);
  };

  private readonly onKey = (event: KeyboardEvent): void => {
    const next = this.target(event.key);
    if (next === null) return;
    event.preventDefault();
    event.stopPropagation();
    if (event.key === "Escape") this.choose(null);
    else if (event.key === "Enter" || event.key === " ") this.choose(next === this.chosen ? null : next);
    else this.moveTo(next);
  };

  /** Where a key leads to; null: it is not ours. */
  private target(key: string): number | null {
    const last = this.marks.length - 1;
    const line = this.state.heat ? this.perLine() : 1;
    const targets: Record<string, number> = {
      ArrowLeft: this.focus - 1,
      ArrowRight: this.focus + 1,
      ArrowUp: this.focus - line,
      ArrowDown: this.focus + line,
      Home: 0,
      End: last,
      Enter: this.focus,
      " ": this.focus,
      Escape: this.focus,
    };
    const target = targets[key];
    return target === undefined ? null : Math.max(0, Math.min(last, target));
  }

  /** Cells side by side in the line of the one in focus. */
  private perLine(): number {
    const tops = this.marks.map((mark) => mark.element.offsetTop);
    return Math.max(1, tops.filter((top) => top === tops[this.focus]).length);
  }

  private moveTo(index: number): void {
    this.marks[this.focus]?.element.setAttribute("tabindex", "-1");
    this.focus = index;
    this.marks[index]?.element.setAttribute("tabindex", "0");
    this.marks[index]?.element.focus();
  }

  private choose(index: number | null): void {
    if (this.chosen !== null) this.marks[this.chosen]?.element.setAttribute("aria-selected", "false");
    this.chosen = index;
    this.send({ type: "choose", value: index });
    this.draw();
  }

  /** Whether a cell seems to run. */
  private get busy(): boolean {
    return this.state.ranks.some((rank) => rank.state === "busy" || rank.state === "stuck");
  }

  private say(words: string): void {
    write(this.note, words);
  }

  private get paused(): boolean {
    return this.wish ?? this.state.head.live === "paused";
  }

  private hear(): void {
    this.heard = Date.now();
    if (this.wish === (this.state.head.live === "paused")) this.wish = null;
  }

  // --- drawing

  private readonly tick = (): void => {
    const silence = (Date.now() - this.heard) / 1000;
    const isNow = this.header.drawLive(this.state.head, this.paused, silence, this.lost);
    this.element.classList.toggle("nbdist-stale", !isNow);
  };

  private drawAll(): void {
    this.state.ranks.forEach((_, index) => this.state.touched.add(index));
    this.draw();
  }

  private draw(): void {
    this.element.classList.toggle("nbdist-waiting", !this.state.known);
    this.header.draw(this.state.head, this.state.trend, this.paused);
    this.tick();
    this.arrange();
    this.drawNodes();
    this.drawMarks();
    this.drawAttention();
    this.drawDetails();
  }

  /** Make the elements anew when ranks have come or gone, or other parts of them are to be seen. */
  private arrange(): void {
    const { heat, ranks, nodes } = this.state;
    const gpus = ranks.some(onGpu);
    const layout = JSON.stringify([heat, gpus, ranks.map((rank) => [rank.rank, rank.node]), nodes.length]);
    if (layout === this.layout) return;
    this.layout = layout;
    this.chosen = null;
    this.focus = 0;
    this.marks = ranks.map(() => (heat ? new Cell() : new Row()));
    this.nodes = nodes.map(() => new NodeLine(!gpus));
    ranks.forEach((rank, index) => {
      const mark = this.marks[index];
      if (mark !== undefined) this.nodes[rank.node]?.body.append(mark.element);
    });
    if (!heat) this.nodes[0]?.body.prepend(headings(gpus));
    this.marks[0]?.element.setAttribute("tabindex", "0");
    this.element.classList.toggle("nbdist-heat", heat);
    this.list.classList.toggle("nbdist-map", heat);
    this.list.classList.toggle("nbdist-dense", heat && ranks.length > DENSE);
    this.list.classList.toggle("nbdist-scrolls", heat && ranks.length > IN_VIEW);
    this.list.classList.toggle("nbdist-unnamed", heat && ranks.length < UNNAMED * nodes.length);
    this.element.classList.toggle("nbdist-cpu", !gpus);
    this.list.replaceChildren(...this.nodes.map((node) => node.element));
    this.drawLegend();
    this.attention.replaceChildren(...(heat ? this.attentionRows.map((row) => row.element) : []), this.others);
  }

  private drawLegend(): void {
    const { heat, ranks } = this.state;
    this.legend.replaceChildren(...(heat ? [this.menu, ...scale(this.metric)] : keys(ranks.some(onGpu))));
  }

  private drawNodes(): void {
    const { heat, nodes, ranks, head } = this.state;
    nodes.forEach((node, index) => {
      const own = heat ? [] : ranks.filter((rank) => rank.node === index);
      this.nodes[index]?.draw(node, head.rate, own);
    });
  }

  private get beside(): Beside {
    const { ranks, head } = this.state;
    return { largest: Math.max(...ranks.map((rank) => held(rank) ?? 0)), known: head.alert?.[1] ?? "" };
  }

  private drawMarks(): void {
    const { heat, ranks, touched } = this.state;
    const beside = this.beside;
    if (heat && this.hasMedianMoved()) for (const index of ranks.keys()) touched.add(index);
    for (const index of heat ? touched : ranks.keys()) {
      const rank = ranks[index];
      const mark = this.marks[index];
      if (rank === undefined) continue;
      if (mark instanceof Row) mark.draw(rank, this.state.history[index], beside);
      else mark?.draw(rank, this.state, this.metric, index);
    }
    touched.clear();
  }

  /** Whether the colors of all cells have to be drawn anew. */
  private hasMedianMoved(): boolean {
    const now = [this.metric, this.state.median(this.metric), this.state.head.alert?.[1]].join();
    const moved = now !== this.median;
    this.median = now;
    return moved;
  }

  private drawAttention(): void {
    const { heat, ranks } = this.state;
    const beside = this.beside;
    const found = heat ? [...ranks.keys()].filter((index) => weight(ranks[index], beside.known) > 0) : [];
    this.worthALook = found.sort((one, other) => weight(ranks[other], beside.known) - weight(ranks[one], beside.known)).slice(0, ATTENTION);
    this.attentionRows.forEach((row, place) => {
      const rank = ranks[this.worthALook[place] ?? -1];
      row.element.hidden = rank === undefined;
      if (rank !== undefined) row.draw(rank, undefined, beside);
    });
    write(this.others, found.length > ATTENTION ? strings.moreWorthALook(found.length - ATTENTION) : "");
  }

  private drawDetails(): void {
    const rank = this.chosen === null ? undefined : this.state.ranks[this.chosen];
    if (this.chosen === null || rank === undefined) {
      this.details.hide();
      return;
    }
    this.marks[this.chosen]?.element.setAttribute("aria-selected", "true");
    this.details.draw(rank, this.state.nodes[rank.node]?.name ?? "");
  }
}

/** A machine and its ranks. */
class NodeLine {
  readonly element = make("div", "node");
  readonly body = make("div", "node-ranks");
  private readonly name = make("span", "node-name");
  private readonly facts = make("span", "node-facts");
  private readonly bar = new MachineBar();

  /** @param shared - Whether ranks share its memory, so that it has a bar. */
  constructor(private readonly shared: boolean) {
    this.element.append(make("div", "node-head", this.name, this.facts), this.bar.element, this.body);
    this.element.setAttribute("role", "group");
  }

  /**
   * @param rate - Seconds between two looks that are asked for; a node may need longer.
   * @param ranks - What its bar shows.
   */
  draw(node: NodeRow, rate: number, ranks: RankRow[]): void {
    const facts = [node.gpus, node.why];
    if (node.cpu !== null) facts.push(strings.spoken.cpu(percent(node.cpu)));
    if (node.used !== null && node.total !== null) facts.push(strings.spoken.memory(partOf(node.used, node.total)));
    if (node.period !== null && node.period > 1.5 * rate) facts.push(strings.sampledEvery(node.period));
    const words = facts.filter(Boolean).join(" · ");
    write(this.name, node.name === "" ? strings.thisMachine : node.name);
    write(this.facts, words);
    this.element.title = this.element.ariaLabel = `${node.name}: ${words}`;
    this.bar.element.hidden = !this.shared || ranks.length === 0 || node.total === null;
    if (!this.bar.element.hidden) this.bar.draw(ranks, node.used, node.total);
  }
}

function weight(rank: RankRow | undefined, known: string): number {
  if (rank === undefined) return 0;
  return rank.state === "stuck" && remarks(rank, known).length === 0 ? 0 : urgency(rank);
}

function keys(gpus: boolean): HTMLElement[] {
  if (!gpus) {
    return [key("part nbdist-segment", strings.rankAlone), key("part nbdist-others", strings.elseInUse), key("free", strings.free)];
  }
  const usual = PARTS.filter((part) => part !== "process"); // who sees one finds it named in the bar's title
  const found = usual.map((part) => key(`part nbdist-${part}`, strings.parts[part]));
  return [...found, key("free", strings.free), key("peak", strings.peak), make("span", "", strings.asNvidiaSmi)];
}

function key(swatch: string, words: string): HTMLElement {
  return make("span", "key", make("i", `swatch nbdist-${swatch}`), words);
}
