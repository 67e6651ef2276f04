/**
 * Shows in the status bar what the ranks of the notebook in front do: "4 ranks: [3 of 4 done]".
 */

import { make, write } from "../words";
import type { App, Modules, NotebookPanel, NotebookTracker, Plugin, StatusBar } from "./jupyter";
import type { Links } from "./link";
import { CUT, CUT_STATUS, SHOW_COMMAND, status, summary } from "./strings";

export function statusPlugin(lab: Modules, links: Links): Plugin {
  return {
    id: "nbdist:status",
    description: "Shows in the status bar what the ranks do.",
    autoStart: true,
    requires: [lab.notebook.INotebookTracker],
    optional: [lab.IStatusBar],
    activate: (app: App, tracker: NotebookTracker, bar: StatusBar | null): void => {
      if (bar === null) return;
      const button = make("button", "status");
      button.addEventListener("click", () => {
        app.shell.activateById("nbdist-ranks");
      });
      const node = make("div", "status-item", button);
      let unwatch: (() => void) | null = null;
      const show = (panel: NotebookPanel | null): void => {
        unwatch?.();
        const link = panel === null ? null : links.of(panel);
        const draw = (): void => {
          const state = link?.state ?? null;
          node.hidden = state === null || (state.ranks === 0 && state.broken === "");
          if (state === null) return;
          const cut = link?.cut === true;
          write(button, cut ? CUT_STATUS : status(state));
          button.title = `${cut ? CUT : summary(state)}\n${SHOW_COMMAND}`;
        };
        unwatch = link?.watch(draw) ?? null;
        draw();
      };
      tracker.currentChanged.connect((_, panel) => {
        show(panel);
      });
      show(tracker.currentWidget);
      bar.registerStatusItem("nbdist:status", { item: new lab.widgets.Widget({ node }), align: "left", rank: 100 });
    },
  };
}
