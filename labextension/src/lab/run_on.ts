/**
 * Where the cells of one notebook run: its toolbar's picker, and a badge at each cell.
 */

import { make, option } from "../words";
import labCss from "../../style/lab.css";
import { ALL, KERNEL, namesRanks, placeOf, withPlace, type Place } from "./cell_line";
import type { Cell, Modules, NotebookPanel } from "./jupyter";
import type { Link } from "./link";
import { LONG, takeLongStreams } from "./long_text";
import { OutputTabs } from "./output_tabs";
import { isReadOnly } from "./read_only";
import { appendToLongStreams } from "./stream_end";
import { addStyle } from "./style";
import { badRanks, CHOOSE, CHOOSE_LABEL, CHOOSE_TITLE, ON_ALL, ON_KERNEL, onRanks, RUN_ON } from "./strings";

const AFTER = "cellType"; // the item of the toolbar that the picker follows

export class RunOn {
  private readonly picker: Picker;
  private readonly badges = new Map<Cell, Picker>();

  constructor(
    private readonly lab: Modules,
    private readonly panel: NotebookPanel,
    private readonly link: Link,
  ) {
    addStyle(labCss);
    takeLongStreams(panel.content);
    this.picker = new Picker(lab, "run-on", isReadOnly(panel));
    const item = new lab.widgets.Widget({ node: make("div", "run-on-item", this.picker.element) });
    item.addClass("jp-Toolbar-item");
    if (!panel.toolbar.insertAfter(AFTER, "nbdist-run-on", item)) panel.toolbar.addItem("nbdist-run-on", item);
    panel.content.activeCellChanged.connect(this.changeCell);
    panel.content.modelContentChanged.connect(this.findCells);
    this.changeCell();
    this.findCells();
  }

  /** Switch the active cell between all ranks and the kernel. */
  toggle(): void {
    const cell = this.cell;
    if (cell === null || isReadOnly(this.panel)) return;
    move(cell, placeOf(cell.model.sharedModel.getSource()).kind === "kernel" ? ALL : KERNEL);
  }

  /** Ask for the active cell's ranks. */
  async choose(): Promise<void> {
    const cell = this.cell;
    if (cell !== null && !isReadOnly(this.panel)) await choose(this.lab, cell);
  }

  private get cell(): Cell | null {
    const cell = this.panel.content.activeCell;
    return cell?.model.type === "code" ? cell : null;
  }

  private readonly changeCell = (): void => {
    this.picker.cell = this.cell;
  };

  /** Each cell has a badge, which goes with it. */
  private readonly findCells = (): void => {
    for (const cell of this.panel.content.widgets) {
      if (cell.model.type === "code" && !this.badges.has(cell)) this.mark(cell);
    }
    for (const cell of this.badges.keys()) if (cell.isDisposed) this.badges.delete(cell);
  };

  private mark(cell: Cell): void {
    const badge = new Picker(this.lab, "badge-of-cell", isReadOnly(this.panel));
    this.badges.set(cell, badge);
    badge.cell = cell;
    badge.element.addEventListener("focus", () => {
      this.panel.content.activeCellIndex = this.panel.content.widgets.indexOf(cell);
    });
    void cell.ready.then(() => {
      if (cell.isDisposed) return;
      cell.inputArea?.node.append(badge.element);
      const { outputs } = cell.model;
      if (outputs === undefined) return;
      appendToLongStreams(outputs, LONG);
      new OutputTabs(cell, outputs, () => badge.onRanks, this.link);
    });
  }
}

/** Says where a cell runs, and takes another place for it. */
class Picker {
  readonly element: HTMLSelectElement;
  private shown: Cell | null = null;
  private place = "";

  constructor(
    private readonly lab: Modules,
    name: string,
    private readonly fixed: boolean,
  ) {
    this.element = make("select", name);
    this.element.setAttribute("aria-label", RUN_ON);
    this.element.title = RUN_ON;
    this.element.addEventListener("change", () => void this.change());
    // Keys and clicks are the picker's, not the notebook's.
    for (const type of ["keydown", "mousedown", "dblclick"]) {
      this.element.addEventListener(type, (event) => {
        event.stopPropagation();
      });
    }
  }

  set cell(cell: Cell | null) {
    if (this.shown?.isDisposed === false) this.shown.model.sharedModel.changed.disconnect(this.draw);
    this.shown = cell;
    cell?.model.sharedModel.changed.connect(this.draw);
    this.place = "";
    this.draw();
  }

  /** Whether the cell runs on ranks. */
  get onRanks(): boolean {
    return this.element.dataset["place"] === "ranks";
  }

  private readonly draw = (): void => {
    const { shown } = this;
    this.element.disabled = this.fixed || shown === null;
    const place = shown === null || shown.isDisposed ? KERNEL : placeOf(shown.model.sharedModel.getSource());
    const key = JSON.stringify(place);
    if (key === this.place) return;
    this.place = key;
    const ranks = place.kind === "ranks" ? place.ranks : "";
    const options = [option("kernel", ON_KERNEL), option("all", ON_ALL)];
    if (ranks !== "") options.push(option("ranks", onRanks(ranks)));
    this.element.replaceChildren(...options, option("choose", CHOOSE));
    this.element.value = place.kind === "kernel" ? "kernel" : ranks === "" ? "all" : "ranks";
    this.element.dataset["place"] = place.kind;
  };

  private async change(): Promise<void> {
    const { shown } = this;
    const wanted = this.element.value;
    this.place = "";
    if (shown !== null && wanted === "choose") await choose(this.lab, shown);
    else if (shown !== null && wanted !== "ranks") move(shown, wanted === "all" ? ALL : KERNEL);
    this.draw();
  }
}

function move(cell: Cell, place: Place): void {
  const { sharedModel } = cell.model;
  const source = sharedModel.getSource();
  const next = withPlace(source, place);
  if (next !== source) sharedModel.setSource(next);
}

/** Ask for ranks, until the answer names some or is withdrawn. */
async function choose(lab: Modules, cell: Cell): Promise<void> {
  const place = placeOf(cell.model.sharedModel.getSource());
  let text = place.kind === "ranks" ? place.ranks : "";
  let label = CHOOSE_LABEL;
  for (;;) {
    const { value } = await lab.apputils.InputDialog.getText({ title: CHOOSE_TITLE, label, text });
    if (value === null || cell.isDisposed) return;
    text = value.replace(/\s/g, "");
    if (text === "" || namesRanks(text)) break;
    label = badRanks(text);
  }
  move(cell, { kind: "ranks", ranks: text });
}
