/**
 * Puts the sidebar "Ranks" into the page, and loads its contents when it is opened. Its buttons are commands, too.
 *
 * Their keys are in schema/ranks.json, where users can change them.
 */

import { canAct, type Action } from "./actions";
import type { App, CommandPalette, Modules, NotebookTracker, Plugin } from "./jupyter";
import type { Link, Links } from "./link";
import type { Sidebar } from "./sidebar";
import { BUTTONS, CATEGORY, COMMANDS, RANKS, SHOW_COMMAND } from "./strings";

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
      const open = (): void => {
        app.shell.activateById(ID);
      };
      const place = new Place(lab, links, tracker, open);
      app.shell.add(place.widget, "right", { rank: 500 });
      const command = "nbdist:show-ranks";
      app.commands.addCommand(command, { label: SHOW_COMMAND, execute: open });
      palette?.addItem({ command, category: CATEGORY });
      addActions(app, links, tracker, palette, place);
    },
  };
}

/** A command for each of the sidebar's buttons, enabled when the button is. */
function addActions(app: App, links: Links, tracker: NotebookTracker, palette: CommandPalette | null, place: Place): void {
  let link: Link | null = null;
  let unwatch: (() => void) | null = null;
  const enabled = new Map<Action, boolean>();
  const look = (): void => {
    for (const [action, before] of enabled) {
      const now = canAct(link, action);
      enabled.set(action, now);
      if (now !== before) app.commands.notifyCommandChanged(`nbdist:${action}`);
    }
  };
  for (const action of Object.keys(COMMANDS) as Action[]) {
    const command = `nbdist:${action}`;
    enabled.set(action, false);
    app.commands.addCommand(command, {
      label: COMMANDS[action],
      caption: BUTTONS[action][1],
      isEnabled: () => canAct(link, action),
      execute: () => place.act(action),
    });
    palette?.addItem({ command, category: CATEGORY });
  }
  const follow = (): void => {
    unwatch?.();
    const panel = tracker.currentWidget;
    link = panel === null ? null : links.of(panel);
    unwatch = link?.watch(look) ?? null;
    look();
  };
  tracker.currentChanged.connect(follow);
  follow();
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
    private readonly open: () => void,
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

  /** Do what a button does. The answer is in the sidebar: it is opened, but for an interrupt that has nothing to say. */
  async act(action: Action): Promise<void> {
    const panel = this.tracker.currentWidget;
    if (panel === null) return;
    const quiet = !this.visible && action.startsWith("interrupt");
    const { text, failed } = quiet ? await this.links.of(panel).ask({ do: action }) : { text: "", failed: false };
    if (quiet && text === "") return;
    this.open();
    await this.show();
    if (quiet) this.sidebar?.say(text, failed);
    else await this.sidebar?.press(action);
  }

  private async show(): Promise<void> {
    if (!this.visible) return;
    const { Sidebar } = await import("./sidebar");
    if (this.sidebar === null) {
      this.sidebar = new Sidebar(this.lab);
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
