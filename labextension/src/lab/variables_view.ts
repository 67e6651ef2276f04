/**
 * The variables of the notebook's ranks: which rank differs from the others, and for a tensor figures of each rank.
 */

import { make, option, size, write } from "../words";
import type { Link } from "./link";
import type { FigureRow, VariableRow } from "./messages";
import * as words from "./strings";

const MIB = 1024 ** 2;

export class VariablesView {
  readonly element = make("details", "variables", make("summary", "machine-title", words.VARIABLES));
  private readonly refresh = make("button", "sidebar-button", words.REFRESH);
  private readonly note = make("p", "machine-note");
  private readonly list = make("ul", "machine-list");
  private link: Link | null = null;
  private chosen = ""; // the variable whose figures are shown
  private seen = ""; // which cells had ended, and how many ran
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
    const now = `${link?.ended ?? 0} ${running}`; // a cell in the background ends unheard
    const changed = now !== this.seen && running === 0;
    const other = link !== this.link;
    this.seen = now;
    this.link = link;
    this.element.hidden = !going;
    if (other) {
      this.chosen = "";
      this.list.replaceChildren();
    }
    if (going && (changed || other)) void this.look();
  }

  private async look(): Promise<void> {
    const { link } = this;
    if (link === null || !this.element.open || this.element.hidden) return;
    const mine = ++this.asked;
    const { text, failed, variables } = await link.ask({ do: "variables" });
    if (mine !== this.asked || link !== this.link) return;
    const rows = variables ?? [];
    write(this.note, failed ? text : rows.length === 0 ? words.NO_VARIABLES : "");
    this.list.replaceChildren(...rows.map((row) => this.item(row)));
  }

  private item(row: VariableRow): HTMLElement {
    const name = make("button", "variable-name", row.name);
    const agreement = make("span", "variable-agreement", row.agreement);
    agreement.dataset["agree"] = row.agree === null ? "unknown" : `${row.agree}`;
    const facts = [row.kind, row.form, row.device, row.size === null ? "" : size(row.size / MIB)].filter(Boolean).join(", ");
    const figures = make("div", "variable-figures");
    name.disabled = !row.figures && row.agree !== null;
    name.setAttribute("aria-expanded", `${row.name === this.chosen}`);
    name.addEventListener("click", () => {
      this.chosen = row.name === this.chosen ? "" : row.name;
      for (const each of this.list.querySelectorAll(".nbdist-variable-figures")) each.replaceChildren();
      for (const each of this.list.querySelectorAll(".nbdist-variable-name")) each.setAttribute("aria-expanded", `${each === name && this.chosen !== ""}`);
      if (this.chosen !== "") void this.show(row, agreement, figures);
    });
    if (row.name === this.chosen) void this.show(row, agreement, figures);
    return make("li", "machine-item", name, agreement, make("div", "machine-facts", facts), figures);
  }

  /** Compare this one, however large it is, and show its figures. */
  private async show(row: VariableRow, agreement: HTMLElement, place: HTMLElement): Promise<void> {
    const { link } = this;
    if (link === null) return;
    write(place, words.WORKING);
    if (row.agree === null) {
      const { variables } = await link.ask({ do: "variables", name: row.name });
      const [found] = variables ?? [];
      if (found !== undefined) {
        write(agreement, found.agreement);
        agreement.dataset["agree"] = `${found.agree ?? "unknown"}`;
      }
    }
    if (!row.figures) {
      place.replaceChildren();
      return;
    }
    const { text, failed, figures } = await link.ask({ do: "figures", name: row.name });
    if (row.name !== this.chosen) return;
    if (failed || figures === null) write(place, text);
    else place.replaceChildren(table(figures), ...(figures.length > 1 ? [comparison(link, row.name, figures)] : []));
  }
}

function table(figures: FigureRow[]): HTMLElement {
  const odd = figures.some((each) => words.special(each) !== "");
  const names = words.FIGURES.filter((name) => odd || name !== words.ODD);
  const head = make("tr", "", ...names.map((name) => make("th", "", name)));
  const rows = figures.map((each) => {
    const numbers = [each.rank, each.low, each.mean, each.high, each.std].map((value) => make("td", "", words.figure(value)));
    const special = odd ? [make("td", "", words.special(each))] : [];
    return make("tr", "", ...numbers, make("td", "", histogram(each.bins)), ...special);
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

/** Two ranks to choose, and where they differ. */
function comparison(link: Link, name: string, figures: FigureRow[]): HTMLElement {
  const pick = (label: string, at: number): HTMLSelectElement => {
    const select = make("select", "start-input");
    select.append(...figures.map(({ rank }) => option(`${rank}`, `rank ${rank}`)));
    select.selectedIndex = at;
    select.setAttribute("aria-label", label);
    return select;
  };
  const [one, other] = [pick(words.FIRST_RANK, 0), pick(words.SECOND_RANK, 1)];
  const button = make("button", "sidebar-button", words.COMPARE);
  const answer = make("div", "machine-facts");
  answer.setAttribute("role", "status");
  button.addEventListener("click", () => {
    write(answer, words.WORKING);
    void link.ask({ do: "difference", name, ranks: `${one.value},${other.value}` }).then(({ text }) => {
      write(answer, text);
    });
  });
  return make("div", "variable-comparison", make("div", "variable-pair", one, other, button), answer);
}
