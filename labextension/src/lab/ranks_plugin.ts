/**
 * Puts the sidebar "Ranks" into the page, and loads its contents when it is opened.
 */

import type { App, CommandPalette, Modules, NotebookTracker, Plugin } from "./jupyter";
import type { Links } from "./link";
import type { Sidebar } from "./sidebar";
import { CATEGORY, RANKS, SHOW_COMMAND } from "./strings";

const ID = "nbdist-ranks";
const ICON = `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 16 16"><g class="jp-icon3" fill="#616161">
<rect x="1" y="2" width="14" height="2.4" rx="1"/><rect x="1" y="6.8" width="9" height="2.4" rx="1"/>
<rect x="1" y="11.6" width="12" height="2.4" rx="1"/></g></svg>`;

export function ranksPlugin(lab: Modules, links: Links): Plugin {
  return {
    id: "nbdist:ranks",
    description: "Shows the ranks of the notebook in front.",
    autoStart: true,
    requires: [lab.notebook.INotebookTracker],
    optional: [lab.apputils.ICommandPalette],
    activate: (app: App, tracker: NotebookTracker, palette: CommandPalette | null): void => {
      const place = new Place(lab, links, tracker);
      app.shell.add(place.widget, "right", { rank: 500 });
      const command = "nbdist:show-ranks";
      app.commands.addCommand(command, {
        label: SHOW_COMMAND,
        execute: () => {
          app.shell.activateById(ID);
        },
      });
      palette?.addItem({ command, category: CATEGORY });
    },
  };
}

/** The sidebar's place in the page. */
class Place {
  readonly widget;
  private sidebar: Sidebar | null = null;
  private visible = false;

  constructor(
    private readonly lab: Modules,
    private readonly links: Links,
    private readonly tracker: NotebookTracker,
  ) {
    const node = document.createElement("div");
    node.setAttribute("role", "region");
    node.setAttribute("aria-label", RANKS);
    const widget = new lab.widgets.Widget({ node });
    this.widget = widget;
    widget.id = ID;
    widget.title.caption = RANKS;
    widget.title.icon = new lab.ui.LabIcon({ name: "nbdist:ranks", svgstr: ICON });
    widget.onAfterShow = () => {
      this.visible = true;
      void this.show();
    };
    widget.onAfterHide = () => {
      this.visible = false;
      this.sidebar?.hide();
    };
    tracker.currentChanged.connect(() => void this.show());
  }

  private async show(): Promise<void> {
    if (!this.visible) return;
    if (this.sidebar === null) {
      const { Sidebar } = await import("./sidebar");
      this.sidebar ??= new Sidebar(this.lab);
      this.widget.node.append(this.sidebar.element);
    }
    if (!this.shown) return; // it has been hidden meanwhile
    const panel = this.tracker.currentWidget;
    this.sidebar.show(panel, panel === null ? null : this.links.of(panel));
  }

  private get shown(): boolean {
    return this.visible;
  }
}
