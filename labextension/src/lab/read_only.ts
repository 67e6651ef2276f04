/** Whether a notebook may be changed: the server says so of its file, and other extensions of its model. */

import type { NotebookPanel } from "./jupyter";

export function isReadOnly({ context }: NotebookPanel): boolean {
  return context.model.readOnly || context.contentsModel?.writable === false;
}
