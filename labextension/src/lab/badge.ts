/**
 * A cell's badge: says where the cell runs. Below a pointer, or with the focus, it is a picker.
 */

import { write } from "../words";
import { placeOf, type Place } from "./cell_line";
import type { Cell, Modules } from "./jupyter";
import { Picker } from "./picker";
import { isLocked } from "./read_only";
import { StandIn } from "./stand_in";
import { ON_ALL, ON_KERNEL, onRanks, READ_ONLY_CELL, RUN_ON, runOn } from "./strings";

const NAME = "badge-of-cell";
const LETTER = 0.6; // of the font's size, on average at most
const EDGES = 16; // pixels: what is around the text

export class Badge {
  private readonly standIn: StandIn;
  private picker: Picker | null = null;
  private place: Place["kind"] = "kernel";
  private drawn = "";
  private input: HTMLElement | null = null;

  /**
   * @param fixed - Whether the notebook is read-only.
   * @param isAuto - Whether the kernel runs plain cells on all ranks, too.
   * @param activate - Makes the cell the active one.
   */
  constructor(
    lab: Modules,
    private readonly cell: Cell,
    private readonly fixed: boolean,
    private readonly isAuto: () => boolean,
    activate: () => void,
  ) {
    this.standIn = new StandIn(NAME, () => {
      this.picker = new Picker(lab, NAME, fixed, isAuto);
      this.picker.cell = cell;
      this.picker.element.addEventListener("focus", activate);
      this.drawn = "";
      this.draw();
      return this.picker.element;
    });
    cell.model.sharedModel.changed.connect(this.draw);
    this.draw();
  }

  /** Whether the cell runs on ranks. */
  get onRanks(): boolean {
    return this.place === "ranks";
  }

  /** Show it in the cell's input, which makes room for it. Styles of a `:has()` would slow all typing. */
  putInto(input: HTMLElement): void {
    this.input = input;
    input.classList.add("nbdist-with-badge");
    input.append(this.standIn.button);
    this.drawn = "";
    this.draw();
  }

  /** Called with each key that is typed in the cell. */
  readonly draw = (): void => {
    if (this.cell.isDisposed) return;
    const source = this.cell.model.sharedModel.getSource();
    const place = placeOf(source, this.isAuto());
    const low = source.split("\n", 3).length < 3;
    const locked = isLocked(this.cell);
    const key = JSON.stringify([place, low, locked]);
    if (key === this.drawn) return;
    this.drawn = key;
    this.place = place.kind;
    const { button } = this.standIn;
    const text = place.kind === "kernel" ? ON_KERNEL : place.ranks === "" ? ON_ALL : onRanks(place.ranks);
    write(button, text);
    button.disabled = this.fixed || locked;
    button.title = locked ? READ_ONLY_CELL : RUN_ON;
    button.setAttribute("aria-label", runOn(text));
    for (const element of [button, this.picker?.element]) {
      if (element === undefined) continue;
      element.dataset["place"] = place.kind;
    }
    this.input?.classList.toggle("nbdist-on-ranks", this.onRanks);
    this.input?.classList.toggle("nbdist-low", low);
    this.input?.style.setProperty("--nbdist-badge", `calc(${text.length * LETTER} * var(--jp-ui-font-size0) + ${EDGES}px)`);
    this.picker?.draw();
  };
}
