/**
 * Where the cells of one notebook run: its toolbar's picker, and a badge at each cell.
 */

import { make } from "../words";
import labCss from "../../style/lab.css";
import { Badge } from "./badge";
import { ALL, KERNEL, placeOf } from "./cell_line";
import type { Cell, Modules, NotebookPanel } from "./jupyter";
import type { Link } from "./link";
import { LONG, takeLongStreams } from "./long_text";
import { OutputTabs } from "./output_tabs";
import { choose, move, Picker } from "./picker";
import { isLocked, isReadOnly } from "./read_only";
import { appendToLongStreams } from "./stream_end";
import { addStyle } from "./style";

const AFTER = "cellType"; // the item of the toolbar that the picker follows

export class RunOn {
  private readonly picker: Picker;
  private readonly badges = new Map<Cell, Badge>();
  private readonly tabs = new Map<Cell, OutputTabs>();
  private auto = false; // as drawn

  constructor(
    private readonly lab: Modules,
    private readonly panel: NotebookPanel,
    private readonly link: Link,
  ) {
    addStyle(labCss);
    takeLongStreams(panel.content);
    this.picker = new Picker(lab, "run-on", isReadOnly(panel), this.isAuto);
    const item = new lab.widgets.Widget({ node: make("div", "run-on-item", this.picker.element) });
    item.addClass("jp-Toolbar-item");
    if (!panel.toolbar.insertAfter(AFTER, "nbdist-run-on", item)) panel.toolbar.addItem("nbdist-run-on", item);
    panel.content.activeCellChanged.connect(this.changeCell);
    panel.content.model?.cells.changed.connect(this.findCells); // later than the notebook, which makes the cell
    const unwatch = link.watch(this.drawAuto);
    panel.disposed.connect(unwatch);
    this.drawAuto();
    this.changeCell();
    this.findCells();
  }

  /** Switch the active cell between all ranks and the kernel. */
  toggle(): void {
    const cell = this.changeable;
    if (cell === null) return;
    const auto = this.isAuto();
    move(this.lab, cell, placeOf(cell.model.sharedModel.getSource(), auto).kind === "kernel" ? ALL : KERNEL, auto);
  }

  /** Ask for the active cell's ranks. */
  async choose(): Promise<void> {
    const cell = this.changeable;
    if (cell !== null) await choose(this.lab, cell, this.isAuto);
  }

  private get cell(): Cell | null {
    const cell = this.panel.content.activeCell;
    return cell?.model.type === "code" ? cell : null;
  }

  /** The active cell if it may be changed. */
  private get changeable(): Cell | null {
    const { cell } = this;
    return cell === null || isReadOnly(this.panel) || isLocked(cell) ? null : cell;
  }

  /** Whether the kernel runs plain cells on all ranks, too. */
  private readonly isAuto = (): boolean => this.link.state?.auto ?? false;

  private readonly drawAuto = (): void => {
    const auto = this.isAuto();
    if (auto === this.auto) return;
    this.auto = auto;
    for (const picker of [this.picker, ...this.badges.values()]) picker.draw();
    if (auto) for (const tabs of this.tabs.values()) tabs.later(); // what ran with auto on keeps its tabs when it ends
  };

  private readonly changeCell = (): void => {
    this.picker.cell = this.cell;
  };

  /** Each cell has a badge, which goes with it. */
  private readonly findCells = (): void => {
    for (const cell of this.panel.content.widgets) {
      if (cell.model.type === "code" && !this.badges.has(cell)) this.mark(cell);
    }
    for (const cells of [this.badges, this.tabs]) {
      for (const cell of cells.keys()) if (cell.isDisposed) cells.delete(cell);
    }
  };

  private mark(cell: Cell): void {
    const activate = (): void => {
      this.panel.content.activeCellIndex = this.panel.content.widgets.indexOf(cell);
    };
    const badge = new Badge(this.lab, cell, isReadOnly(this.panel), this.isAuto, activate);
    this.badges.set(cell, badge);
    void cell.ready.then(() => {
      if (cell.isDisposed) return;
      if (cell.inputArea !== null) badge.putInto(cell.inputArea.node);
      const { outputs } = cell.model;
      if (outputs === undefined) return;
      appendToLongStreams(outputs, LONG);
      const { Clipboard } = this.lab.apputils;
      const copyText = (text: string): void => {
        Clipboard.copyToSystem(text);
      };
      this.tabs.set(cell, new OutputTabs(cell, outputs, () => badge.onRanks, this.link, copyText));
    });
  }
}
