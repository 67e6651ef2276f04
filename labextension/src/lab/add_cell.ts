/**
 * Adds a cell to a notebook and runs it, so that the notebook stays the record of what was done.
 */

import type { Modules, NotebookPanel } from "./jupyter";

/** The active cell takes the source if it is an empty code cell, else a new one below it. */
export async function addAndRun(lab: Modules, panel: NotebookPanel, source: string): Promise<void> {
  const { NotebookActions } = lab.notebook;
  const notebook = panel.content;
  const empty = notebook.activeCell?.model.type === "code" && notebook.activeCell.model.sharedModel.getSource().trim() === "";
  if (!empty) NotebookActions.insertBelow(notebook);
  notebook.activeCell?.model.sharedModel.setSource(source);
  await NotebookActions.run(notebook, panel.sessionContext);
}
