/** Whether a notebook may be changed, as the server says of its file and other extensions of its model, or a cell. */

import type { Cell, NotebookPanel } from "./jupyter";

export function isReadOnly({ context }: NotebookPanel): boolean {
  return context.model.readOnly || context.contentsModel?.writable === false;
}

/** Whether the notebook's author has locked the cell. */
export function isLocked(cell: Cell): boolean {
  return cell.model.sharedModel.getMetadata("editable") === false;
}
