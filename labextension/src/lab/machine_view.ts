/**
 * The sessions and the GPUs of the server's machine, below the panel: also those of other notebooks, and without any.
 */

import type { GpuRow, Machine, SessionRow } from "../generated/wire";
import { make, percent, size, write } from "../words";
import type { Modules } from "./jupyter";
import type { Link } from "./link";
import { act, lookAtMachine, type Act } from "./machine";
import { isReadOnly } from "./read_only";
import * as words from "./strings";

const PERIOD = 5000; // milliseconds between two looks, while somebody sees it
const MIB = 1024 ** 2;

export class MachineView {
  readonly element = make("details", "machine", make("summary", "machine-title", words.MACHINE));
  private readonly note = make("p", "machine-note");
  private readonly sessions = make("ul", "machine-list");
  private readonly gpus = make("ul", "machine-list");
  private link: Link | null = null;
  private own: string | null = ""; // the session that the notebook in front drives; empty: none, null: not known
  private found: Machine | string = "";
  private readonly pressed = new Set<string>(); // buttons that have not done their work yet, also those drawn anew
  private drawn = "";
  private due = 0;
  private seen = false;

  constructor(
    private readonly lab: Modules,
    private readonly attach: (name: string, take: boolean) => Promise<void>,
  ) {
    this.sessions.setAttribute("aria-label", words.SESSIONS);
    this.gpus.setAttribute("aria-label", words.GPUS);
    this.note.setAttribute("role", "status");
    this.element.append(this.note, this.sessions, this.gpus);
    this.element.addEventListener("toggle", () => void this.look());
  }

  /** Whether somebody sees the sidebar. */
  set visible(visible: boolean) {
    this.seen = visible;
    if (visible) void this.look();
    else window.clearTimeout(this.due);
  }

  /** Show it for this notebook, and anew when its kernel drives another session. */
  draw(link: Link | null): void {
    if (link === this.link && link?.asking === true) return; // as before, until the kernel answers
    const own = drivenBy(link);
    const news = own !== this.own;
    if (link !== this.link) this.pressed.clear(); // another notebook waits for none of them
    this.link = link;
    this.own = own;
    this.render();
    if (news) void this.look();
  }

  private async look(): Promise<void> {
    window.clearTimeout(this.due);
    if (!this.isLookedAt()) return;
    const found = await lookAtMachine(this.lab);
    window.clearTimeout(this.due);
    if (!this.isLookedAt()) return;
    this.found = found;
    this.render();
    this.due = window.setTimeout(() => void this.look(), PERIOD);
  }

  private isLookedAt(): boolean {
    return this.seen && this.element.open;
  }

  private render(): void {
    const { found } = this;
    if (found === "") return; // nobody has looked yet
    const key = JSON.stringify([found, this.own, this.addsCells]);
    if (key === this.drawn) return; // a button that has the focus keeps it
    this.drawn = key;
    const machine = typeof found === "string" ? null : found;
    write(this.note, typeof found === "string" ? found : words.machineSummary(found.host, found.sessions.length, found.gpus.length));
    this.sessions.replaceChildren(...(machine?.sessions ?? []).map((session) => this.session(session)));
    this.gpus.replaceChildren(...(machine?.gpus ?? []).map(gpu));
  }

  private session(session: SessionRow): HTMLElement {
    const title = make("div", "machine-name", words.sessionName(session.name, session.notebook));
    const item = make("li", "machine-item", title);
    if (!session.answers) item.append(make("div", "machine-facts", words.NO_ANSWER));
    else item.append(...words.sessionFacts(session, size(session.memory / MIB)).map((line) => make("div", "machine-facts", line)));
    const buttons = make("div", "sidebar-buttons");
    const taken = session.client === "there";
    const ours = this.own === null ? taken : session.name === this.own;
    if (this.addsCells && session.answers && !ours) {
      buttons.append(
        this.button(words.ATTACH, taken ? words.TAKE_CAPTION : words.ATTACH_CAPTION, session, async () => {
          if (!taken || (await this.confirmed(words.TAKE, words.TAKE_QUESTION))) await this.attach(session.name, taken);
          return "";
        }),
      );
    }
    const idle = session.running.length === 0;
    const interrupt = this.button(words.BUTTONS.interrupt[0], words.BUTTONS.interrupt[1], session, () => this.do("interrupt", session));
    interrupt.disabled = idle;
    const stop = this.button(words.BUTTONS.stop[0], words.stopCaption(session.gpus > 0), session, async () => {
      const question = [words.CONFIRM.stop, words.stopQuestion(session)] as const;
      return (await this.confirmed(words.BUTTONS.stop[0], question)) ? this.do("stop", session) : "";
    });
    buttons.append(interrupt, stop);
    item.append(buttons);
    return item;
  }

  /** Whether there is a notebook that takes a cell. */
  private get addsCells(): boolean {
    return this.link !== null && !isReadOnly(this.link.panel);
  }

  private button(label: string, caption: string, session: SessionRow, press: () => Promise<string>): HTMLButtonElement {
    const button = make("button", "sidebar-button", label);
    button.title = caption;
    const name = `${label} ${session.name}`;
    button.setAttribute("aria-label", name);
    button.addEventListener("click", () => {
      if (this.pressed.has(name)) return; // and not disabled, as it would lose the focus
      this.pressed.add(name);
      void press()
        .then((trouble) => {
          if (trouble !== "") write(this.note, trouble);
        })
        .finally(() => {
          this.pressed.delete(name);
        });
    });
    return button;
  }

  private async do(what: Act, session: SessionRow): Promise<string> {
    const trouble = await act(this.lab, what, session.name);
    await this.look();
    return trouble;
  }

  private async confirmed(label: string, [title, body]: readonly [string, string]): Promise<boolean> {
    const { apputils } = this.lab;
    const buttons = [apputils.Dialog.cancelButton(), apputils.Dialog.warnButton({ label })];
    return (await apputils.showDialog({ title, body, buttons })).button.accept;
  }
}

function drivenBy(link: Link | null): string | null {
  if (link === null) return "";
  if (link.state !== null) return link.state.session;
  return link.asking || link.trouble !== "" ? null : "";
}

function gpu(row: GpuRow): HTMLElement {
  const used = row.used === null ? null : row.used / MIB;
  const total = row.total === null ? null : row.total / MIB;
  const item = make("li", "machine-item", make("div", "machine-name", words.gpuName(row.index, row.name)));
  item.append(make("div", "machine-facts", words.gpuFacts(size(used), size(total), percent(row.utilization === null ? null : 100 * row.utilization))));
  for (const holder of row.holders) item.append(make("div", "machine-facts", words.holderLine(holder, size(holder.memory / MIB))));
  return item;
}
