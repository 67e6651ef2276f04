/**
 * Takes the place where a cell runs, and writes it into the cell's first line.
 */

import { make, option } from "../words";
import { ALL, change, KERNEL, keptByLine, namesRanks, placeOf, plainRanks, withPlace, type Place } from "./cell_line";
import type { Cell, Modules } from "./jupyter";
import { isLocked } from "./read_only";
import { badRanks, CHOOSE, CHOOSE_LABEL, CHOOSE_TITLE, NOT_MOVED_TITLE, notMoved } from "./strings";
import { ON_ALL, ON_KERNEL, onRanks, READ_ONLY_CELL, RUN_ON } from "./strings";

/** Says where a cell runs, and takes another place for it. */
export class Picker {
  readonly element: HTMLSelectElement;
  private shown: Cell | null = null;
  private place = "";

  constructor(
    private readonly lab: Modules,
    name: string,
    private readonly fixed: boolean,
    private readonly isAuto: () => boolean,
  ) {
    this.element = make("select", name);
    this.element.setAttribute("aria-label", RUN_ON);
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

  readonly draw = (): void => {
    const shown = this.shown?.isDisposed === false ? this.shown : null;
    const locked = shown !== null && isLocked(shown);
    this.element.disabled = this.fixed || shown === null || locked;
    this.element.title = locked ? READ_ONLY_CELL : RUN_ON;
    const place = placeOf(shown?.model.sharedModel.getSource() ?? "", shown !== null && this.isAuto());
    const key = JSON.stringify(place);
    if (key === this.place) return;
    this.place = key;
    const ranks = place.kind === "ranks" ? place.ranks : "";
    const options = [option("kernel", ON_KERNEL), option("all", ON_ALL)];
    if (ranks !== "") options.push(option("ranks", onRanks(ranks)));
    this.element.replaceChildren(...options, option("choose", CHOOSE));
    this.element.value = place.kind === "kernel" ? "kernel" : ranks === "" ? "all" : "ranks";
  };

  private async change(): Promise<void> {
    const { shown } = this;
    const wanted = this.element.value;
    this.place = "";
    if (shown !== null && wanted === "choose") await choose(this.lab, shown, this.isAuto);
    else if (shown !== null && wanted !== "ranks") {
      move(this.lab, shown, wanted === "all" ? ALL : KERNEL, this.isAuto());
    }
    this.draw();
  }
}

export function move(lab: Modules, cell: Cell, place: Place, auto: boolean): void {
  const { sharedModel } = cell.model;
  const source = sharedModel.getSource();
  const line = place.kind === "ranks" ? keptByLine(source) : null;
  if (line !== null) {
    const buttons = [lab.apputils.Dialog.okButton()];
    void lab.apputils.showDialog({ title: NOT_MOVED_TITLE, body: notMoved(line), buttons });
    return;
  }
  rewrite(cell, source, withPlace(source, place, auto));
}

/** Replace what differs, so that the cursor stays at its text. */
function rewrite(cell: Cell, source: string, next: string): void {
  if (next === source) return;
  const { start, end, value } = change(source, next);
  const { editor } = cell;
  const cursor = editor?.getOffsetAt(editor.getCursorPosition());
  cell.model.sharedModel.updateSource(start, end, value);
  // The editor leaves a cursor above a line that is inserted where it stands.
  if (cursor !== start || start !== end || !value.endsWith("\n")) return;
  const wanted = editor?.getPositionAt(cursor + value.length);
  if (wanted !== undefined) editor?.setCursorPosition(wanted);
}

/** Ask for ranks, until the answer names some or is withdrawn. */
export async function choose(lab: Modules, cell: Cell, isAuto: () => boolean): Promise<void> {
  const place = placeOf(cell.model.sharedModel.getSource(), isAuto());
  let text = place.kind === "ranks" ? place.ranks : "";
  let label = CHOOSE_LABEL;
  for (;;) {
    const { value } = await lab.apputils.InputDialog.getText({ title: CHOOSE_TITLE, label, text });
    if (value === null || cell.isDisposed) return;
    text = value.replace(/\s/g, "");
    if (text === "" || namesRanks(text)) break;
    label = badRanks(text);
  }
  move(lab, cell, { kind: "ranks", ranks: plainRanks(text) }, isAuto());
}
