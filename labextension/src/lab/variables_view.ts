/**
 * The variables of the notebook's ranks: which rank differs from the others, and for a tensor figures of each rank.
 */

import { make, option, write } from "../words";
import type { Link } from "./link";
import type { FigureRow, VariableRow } from "../generated/wire";
import * as words from "./strings";

export class VariablesView {
  readonly element = make("details", "variables", make("summary", "machine-title", words.VARIABLES));
  private readonly refresh = make("button", "sidebar-button", words.REFRESH);
  private readonly note = make("p", "machine-note");
  private readonly list = make("ul", "machine-list");
  private link: Link | null = null;
  private chosen: string[] = []; // what is open: a variable, the entry in it that is open, and so on
  private seen = ""; // which cells had ended, how many ran, and which ranks there were
  private comparison: Comparison | null = null; // of the chosen variable
  private asked = 0; // counts questions, of which only the last one's answer is shown

  constructor() {
    this.note.setAttribute("role", "status");
    this.list.setAttribute("aria-label", words.VARIABLES);
    this.refresh.addEventListener("click", () => void this.look());
    this.element.append(this.refresh, this.note, this.list);
    this.element.addEventListener("toggle", () => void this.look());
  }

  /** Show those of this notebook; a cell that has ended may have changed them. */
  draw(link: Link | null, going: boolean): void {
    const running = link?.state?.cells.length ?? 0;
    const now = `${link?.ended ?? 0} ${running} ${link?.renewed ?? 0}`; // a cell in the background ends unheard
    const changed = now !== this.seen && running === 0;
    const other = link !== this.link;
    this.seen = now;
    this.link = link;
    this.element.hidden = !going;
    if (other) {
      this.choose([]);
      this.list.replaceChildren();
    }
    if (going && (changed || other)) void this.look();
  }

  private choose(names: string[]): void {
    this.chosen = names;
    this.comparison = null;
  }

  private async look(): Promise<void> {
    const { link } = this;
    if (link === null || !this.element.open || this.element.hidden) return;
    const mine = ++this.asked;
    const { text, failed, variables } = await link.ask({ do: "variables" });
    if (mine !== this.asked || link !== this.link) return;
    const rows = variables ?? [];
    write(this.note, failed ? text : rows.length === 0 ? words.NO_VARIABLES : "");
    this.list.replaceChildren(...rows.map((row) => this.item(row, 0)));
  }

  /** A variable, or at a depth of 1 or more an entry in one that is open. */
  private item(row: VariableRow, depth: number): HTMLElement {
    const name = make("button", "variable-name", row.name);
    const agreement = make("span", "variable-agreement");
    showAgreement(agreement, row);
    const facts = [row.kind, row.form, row.device, row.memory].filter(Boolean).join(", ");
    const inside = make("div", "variable-inside");
    const isOpen = row.name === this.chosen[depth];
    name.disabled = !row.figures && !row.inside && row.agree !== null;
    name.setAttribute("aria-expanded", `${isOpen}`);
    name.addEventListener("click", () => {
      const opens = name.getAttribute("aria-expanded") === "false";
      this.choose([...this.chosen.slice(0, depth), ...(opens ? [row.name] : [])]);
      const siblings = name.closest("ul") ?? this.list;
      for (const each of siblings.querySelectorAll(".nbdist-variable-inside")) each.replaceChildren();
      for (const each of siblings.querySelectorAll(".nbdist-variable-name")) each.setAttribute("aria-expanded", `${each === name && opens}`);
      if (opens) void this.show(row, depth, agreement, inside);
    });
    if (isOpen) void this.show(row, depth, agreement, inside);
    return make("li", "machine-item", name, agreement, make("div", "machine-facts", facts), inside);
  }

  /** Compare this one, however large it is, and show its figures, or what differs in it. */
  private async show(row: VariableRow, depth: number, agreement: HTMLElement, place: HTMLElement): Promise<void> {
    const { link } = this;
    if (link === null) return;
    write(place, words.WORKING);
    if (row.agree === null) {
      const { variables } = await link.ask({ do: "variables", name: row.name });
      const [found] = variables ?? [];
      if (found !== undefined) showAgreement(agreement, found);
      row = found ?? row;
    }
    if (!row.figures && !row.inside) {
      place.replaceChildren();
      return;
    }
    const { text, failed, figures, variables } = await link.ask({ do: row.inside ? "entries" : "figures", name: row.name });
    if (row.name !== this.chosen[depth] || !this.list.contains(place)) return; // a later look has taken its place
    if (failed) write(place, text);
    else if (variables !== null) place.replaceChildren(...this.entries(variables, text, depth));
    else if (figures !== null) place.replaceChildren(table(figures), ...(figures.length > 1 ? [this.comparisonOf(link, row.name, figures)] : []));
  }

  private entries(rows: VariableRow[], note: string, depth: number): HTMLElement[] {
    const list = make("ul", "machine-list", ...rows.map((row) => this.item(row, depth + 1)));
    list.setAttribute("aria-label", words.ENTRIES);
    return [list, make("p", "machine-note", rows.length === 0 && note === "" ? words.NO_ENTRIES : note)];
  }

  private comparisonOf(link: Link, name: string, figures: FigureRow[]): HTMLElement {
    this.comparison ??= new Comparison(link, name);
    this.comparison.offer(figures);
    return this.comparison.element;
  }
}

function showAgreement(element: HTMLElement, row: VariableRow): void {
  write(element, row.agreement);
  element.dataset["agree"] = row.agree === null ? "unknown" : `${row.agree}`;
}

function table(figures: FigureRow[]): HTMLElement {
  const odd = figures.some((each) => words.special(each) !== "");
  const names = words.FIGURES.filter((name) => odd || name !== words.ODD);
  const head = make("tr", "", ...names.map((name) => make("th", "", name)));
  const rows = figures.map((each) => {
    const numbers = [each.low, each.mean, each.high, each.std].map((value) => make("td", "", words.figure(value)));
    const special = odd ? [make("td", "", words.special(each))] : [];
    return make("tr", "", make("td", "", `${each.rank}`), make("td", "", histogram(each.bins)), ...special, ...numbers);
  });
  const element = make("div", "variable-table", make("table", "", make("thead", "", head), make("tbody", "", ...rows)));
  element.tabIndex = 0; // it scrolls
  return element;
}

function histogram(bins: number[]): HTMLElement {
  const most = Math.max(1, ...bins);
  const element = make("div", "variable-histogram");
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", `${words.HISTOGRAM}: ${bins.join(" ")}`);
  for (const count of bins) {
    const bar = make("span", "variable-bar");
    bar.style.height = `${Math.ceil((100 * count) / most)}%`;
    element.append(bar);
  }
  return element;
}

/** Two ranks to choose, and where they differ: of one variable, for as long as it is the chosen one. */
class Comparison {
  readonly element: HTMLElement;
  private readonly one = pick(words.FIRST_RANK);
  private readonly other = pick(words.SECOND_RANK);
  private readonly answer = make("div", "machine-facts");
  private known = ""; // what was answered last; empty: nothing, or it is on its way

  constructor(
    private readonly link: Link,
    private readonly name: string,
  ) {
    const button = make("button", "sidebar-button", words.COMPARE);
    this.answer.setAttribute("role", "status");
    button.addEventListener("click", () => void this.ask());
    this.element = make("div", "variable-comparison", make("div", "variable-pair", this.one, this.other, button), this.answer);
  }

  /** Offer these ranks; those that were chosen stay so. An answer is from before: the values may have changed. */
  offer(figures: FigureRow[]): void {
    const ranks = figures.map(({ rank }) => `${rank}`);
    for (const [select, at] of [[this.one, 0], [this.other, 1]] as const) {
      const { value } = select;
      select.replaceChildren(...ranks.map((rank) => option(rank, words.onRanks(rank))));
      select.selectedIndex = ranks.includes(value) ? ranks.indexOf(value) : at;
    }
    if (this.known !== "") write(this.answer, words.before(this.known));
  }

  private async ask(): Promise<void> {
    this.known = "";
    write(this.answer, words.WORKING);
    const { text } = await this.link.ask({ do: "difference", name: this.name, ranks: `${this.one.value},${this.other.value}` });
    this.known = text;
    write(this.answer, text);
  }
}

function pick(label: string): HTMLSelectElement {
  const select = make("select", "start-input");
  select.setAttribute("aria-label", label);
  return select;
}
