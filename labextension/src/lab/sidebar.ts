/**
 * The sidebar "Ranks": the panel of the notebook in front, buttons that act while cells run, and a form that starts ranks.
 *
 * Loaded when the sidebar is opened for a notebook. Everything it does a magic does too.
 */

import { make, write } from "../words";
import { createView, type View } from "../view";
import labCss from "../../style/lab.css";
import panelCss from "../../style/panel.css";
import { canAct, type Action } from "./actions";
import { addAndRun } from "./add_cell";
import { headline } from "./headline";
import type { Modules, NotebookPanel } from "./jupyter";
import type { Link } from "./link";
import { MachineView } from "./machine_view";
import { PlanForm } from "./plan_form";
import { StartForm } from "./start_form";
import { addStyle } from "./style";
import { BUTTONS, CLEAR, CONFIRM, DONE, loss, progress, stopCaption, WORKING } from "./strings";
import { VariablesView } from "./variables_view";

/** What the sidebar shows; `element` is in the page. */
export class Sidebar {
  readonly element = make("div", "sidebar");
  private readonly heading = make("div", "sidebar-head");
  private readonly cells = make("div", "sidebar-cells");
  private readonly bar = make("div", "sidebar-buttons");
  private readonly buttons = new Map<Action, HTMLButtonElement>();
  private readonly answer = make("div", "sidebar-answer");
  private readonly text = make("pre", "sidebar-text");
  private readonly place = make("div", "sidebar-panel");
  private readonly form: StartForm;
  private readonly plan: PlanForm;
  private readonly variables = new VariablesView();
  private readonly machine: MachineView;
  private view: View | null = null;
  private link: Link | null = null;
  private last: Link | null = null; // also while the sidebar is hidden
  private unwatch: (() => void) | null = null;
  private following = false;

  constructor(private readonly lab: Modules) {
    addStyle(panelCss);
    addStyle(labCss);
    this.form = new StartForm(lab);
    this.plan = new PlanForm(lab);
    this.machine = new MachineView(lab, (name, take) => this.attach(name, take));
    for (const name of Object.keys(BUTTONS) as Action[]) this.bar.append(this.button(name));
    const clear = make("button", "sidebar-button", CLEAR);
    clear.addEventListener("click", () => {
      this.say("");
    });
    this.answer.append(this.text, clear);
    this.answer.hidden = true;
    this.heading.setAttribute("role", "status");
    this.text.setAttribute("role", "status");
    this.text.tabIndex = 0;
    this.element.append(this.heading, this.cells, this.bar, this.answer, this.place, this.form.element);
    this.element.append(this.plan.element, this.variables.element, this.machine.element);
  }

  /** Show this notebook; null: there is none. */
  show(panel: NotebookPanel | null, link: Link | null): void {
    if (link === this.link && this.unwatch !== null) return;
    this.hide();
    if (link !== this.last) this.say("");
    this.last = link;
    this.link = link;
    this.form.panel = panel;
    this.unwatch = link?.watch(this.draw) ?? null;
    this.draw();
    this.machine.visible = true;
  }

  /** Look at nothing, as nobody sees it. */
  hide(): void {
    this.machine.visible = false;
    this.unwatch?.();
    this.unwatch = null;
    this.stopFollowing();
    this.link = null;
  }

  private async attach(name: string, take: boolean): Promise<void> {
    const { panel } = this.form;
    if (panel === null) return;
    const load = this.link?.state === null ? "%load_ext nbdist\n" : "";
    await addAndRun(this.lab, panel, `${load}%distributed attach ${name}${take ? " --take" : ""}`);
  }

  private button(name: Action): HTMLButtonElement {
    const [label, caption] = BUTTONS[name];
    const button = make("button", "sidebar-button", label);
    button.title = caption;
    button.addEventListener("click", () => void this.press(name));
    this.buttons.set(name, button);
    return button;
  }

  /** Act on the ranks of the notebook that is shown, after a question where their variables would be lost. */
  async press(name: Action): Promise<void> {
    const { link } = this;
    if (link === null || !(await this.confirmed(name))) return;
    const [label] = BUTTONS[name];
    this.say(`${label} ${WORKING}`);
    const { text, failed } = await link.ask({ do: name });
    if (link === this.link) this.say(text === "" ? `${label}: ${DONE}` : text, failed);
  }

  private async confirmed(name: Action): Promise<boolean> {
    if (name !== "restart" && name !== "stop") return true;
    const { apputils } = this.lab;
    const title = CONFIRM[name];
    const body = loss(name === "stop" && this.hasGpus);
    const buttons = [apputils.Dialog.cancelButton(), apputils.Dialog.warnButton({ label: BUTTONS[name][0] })];
    return (await apputils.showDialog({ title, body, buttons })).button.accept;
  }

  private get hasGpus(): boolean {
    return this.link?.state?.devices.some((device) => device !== "cpu") === true;
  }

  /** Show an answer until it is cleared. */
  say(text: string, failed = false): void {
    write(this.text, text);
    this.answer.hidden = text === "";
    this.answer.classList.toggle("nbdist-failed", failed);
  }

  // --- drawing

  private readonly draw = (): void => {
    const { link } = this;
    const state = link?.state ?? null;
    const going = state !== null && state.ranks > 0;
    write(this.heading, headline(link));
    this.cells.replaceChildren(...(state?.cells ?? []).map((cell) => make("div", "sidebar-cell", progress(cell, link?.age ?? 0))));
    this.bar.hidden = !going && (state === null || state.broken === "");
    for (const [name, button] of this.buttons) {
      button.disabled = !canAct(link, name);
      if (name === "stop") button.title = stopCaption(this.hasGpus);
    }
    this.form.draw(link, going);
    this.plan.draw(link);
    this.variables.draw(link, going);
    this.machine.draw(link);
    if (state !== null && !this.following) this.follow();
    if (state === null) this.stopFollowing();
    this.place.hidden = !going;
  };

  private follow(): void {
    const { link } = this;
    if (link === null) return;
    this.following = true;
    this.view = createView(this.place, (wish) => link.wish(wish));
    link.follow((news) => {
      if (news.type === "frame") this.view?.load(news.frame);
      else this.view?.receive(news);
    });
  }

  private stopFollowing(): void {
    if (!this.following) return;
    this.following = false;
    this.link?.unfollow();
    this.view?.dispose();
    this.view = null;
  }
}
