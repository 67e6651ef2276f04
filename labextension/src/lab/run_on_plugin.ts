/**
 * Shows where cells run, and changes it: a picker in the notebook's toolbar, a badge at each cell, two commands.
 * Their keys are in schema/ranks.json, where users can change them.
 *
 * All of them read and write the cell's `%%distributed` line, so that the notebook runs everywhere.
 */

import { usesRanks } from "./cell_line";
import type { App, CommandPalette, Modules, NotebookPanel, NotebookTracker, Plugin } from "./jupyter";
import type { Links } from "./link";
import type { RunOn } from "./run_on";
import { CATEGORY, CHOOSE_COMMAND, TOGGLE_COMMAND } from "./strings";

export function runOnPlugin(lab: Modules, links: Links): Plugin {
  return {
    id: "nbdist:run-on",
    description: "Shows and changes where a cell runs: in the kernel, or on ranks.",
    autoStart: true,
    requires: [lab.notebook.INotebookTracker],
    optional: [lab.apputils.ICommandPalette],
    activate: (app: App, tracker: NotebookTracker, palette: CommandPalette | null): void => {
      const open = new Map<string, RunOn>();
      tracker.widgetAdded.connect((_, panel) => void watch(lab, links, panel, open));
      tracker.forEach((panel) => void watch(lab, links, panel, open));
      const command = (id: string, label: string, execute: (runOn: RunOn) => void): void => {
        app.commands.addCommand(id, {
          label,
          isEnabled: () => tracker.currentWidget !== null,
          execute: async () => {
            const panel = tracker.currentWidget;
            if (panel !== null) execute(open.get(panel.id) ?? (await begin(lab, links, panel, open)));
          },
        });
        palette?.addItem({ command: id, category: CATEGORY });
      };
      command("nbdist:toggle-ranks", TOGGLE_COMMAND, (runOn) => {
        runOn.toggle();
      });
      command("nbdist:choose-ranks", CHOOSE_COMMAND, (runOn) => void runOn.choose());
    },
  };
}

/** Begin when the notebook has its first cell that mentions nbdist. */
async function watch(lab: Modules, links: Links, panel: NotebookPanel, open: Map<string, RunOn>): Promise<void> {
  await panel.context.ready;
  const { model, modelContentChanged } = panel.content;
  // Of a new cell, the model tells before the notebook has it: its list of cells tells again when it has.
  const changes = model === null ? [modelContentChanged] : [modelContentChanged, model.cells.changed];
  const look = (): void => {
    const found = panel.content.widgets.some((cell) => usesRanks(cell.model.sharedModel.getSource()));
    if (!found) return;
    for (const change of changes) change.disconnect(look);
    void begin(lab, links, panel, open);
  };
  for (const change of changes) change.connect(look);
  look();
}

async function begin(lab: Modules, links: Links, panel: NotebookPanel, open: Map<string, RunOn>): Promise<RunOn> {
  const { RunOn } = await import("./run_on");
  const found = open.get(panel.id);
  if (found !== undefined) return found;
  const runOn = new RunOn(lab, panel, links.of(panel));
  open.set(panel.id, runOn);
  panel.disposed.connect(() => open.delete(panel.id));
  return runOn;
}
