/**
 * The form that starts ranks: it writes a cell and runs it, so the notebook stays the record of what was done.
 */

import { make, option, write } from "../words";
import { addAndRun } from "./add_cell";
import type { Modules, NotebookPanel } from "./jupyter";
import type { Link } from "./link";
import { isReadOnly } from "./read_only";
import { precisions, strategies } from "./plan_words.json";
import settings from "./start_fields.json"; // what nbdist's table of settings has for this form
import {
  PLAN,
  PLAN_CAPTION,
  PLAN_UNSET,
  PRECISION,
  READ_ONLY,
  START,
  START_CAPTION_CPU,
  START_NOTE,
  WRITE_AND_RUN,
  WRITES,
} from "./strings";

const CPU_RANKS = "2"; // where there is no GPU to count

/** A setting that the form has. */
export type Setting = (typeof settings)[number];

export class StartForm {
  readonly element = make("form", "start");
  panel: NotebookPanel | null = null;
  private readonly inputs = new Map(settings.map((setting) => [setting, inputOf(setting)]));
  private readonly plan = make("select", "start-input");
  private readonly precision = make("select", "start-input");
  private readonly preview = make("pre", "start-preview");
  private readonly problem = make("p", "start-problem");
  private readonly submit = make("button", "sidebar-button", WRITE_AND_RUN);
  private readonly starting = new WeakSet<NotebookPanel>(); // notebooks whose added cell has not ended
  private loaded = false;
  private known = "";

  constructor(private readonly lab: Modules) {
    this.plan.title = PLAN_CAPTION;
    const offered = strategies.filter((name) => name !== "none"); // the plan form below has it
    this.plan.append(option("", PLAN_UNSET), ...offered.map((name) => option(name, name)));
    this.precision.append(...precisions.map((name) => option(name, name)));
    this.problem.setAttribute("role", "alert");
    const fields = [...this.inputs].map(([{ label }, input]) => field(label, input));
    fields.push(field(PLAN, this.plan), field(PRECISION, this.precision));
    const title = make("h3", "start-title", START);
    this.element.append(title, make("p", "start-note", START_NOTE), ...fields, make("p", "start-note", WRITES), this.preview, this.problem, this.submit);
    this.element.addEventListener("input", this.check);
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.run();
    });
  }

  /** @param going - Whether ranks run, so that there is nothing to start. */
  draw(link: Link | null, going: boolean): void {
    this.element.hidden = link === null || going || link.trouble !== "";
    const gpus = link?.state?.gpus;
    this.loaded = link?.state !== null;
    if (gpus !== undefined && this.known !== `${gpus}`) {
      this.known = `${gpus}`;
      for (const [setting, input] of this.inputs) fit(setting, input, gpus === 0);
    }
    this.check();
  }

  /** The cell that the form describes. */
  private get source(): string {
    const fields = [...this.inputs].map(([setting, input]): [Setting, string] => [
      setting,
      input.parentElement?.hidden === true ? "" : input.value,
    ]);
    return sourceOf(fields, { plan: this.plan.value, precision: this.precision.value, loaded: this.loaded, cpu: this.known === "0" });
  }

  private readonly check = (): void => {
    const wrong = [...this.inputs].find(([setting, input]) => !fits(setting, input.value.trim()));
    let problem = wrong?.[0].problem ?? "";
    if (problem === "" && this.panel !== null && isReadOnly(this.panel)) problem = READ_ONLY;
    this.precision.disabled = this.plan.value === "";
    write(this.problem, problem);
    this.submit.disabled = problem !== "" || (this.panel !== null && this.starting.has(this.panel));
    write(this.preview, this.source);
  };

  private async run(): Promise<void> {
    const { panel } = this;
    this.check();
    if (panel === null || this.submit.disabled) return;
    const { source } = this;
    this.starting.add(panel);
    this.check();
    try {
      await addAndRun(this.lab, panel, source);
    } finally {
      this.starting.delete(panel);
      this.check();
    }
  }
}

/** What the form's cell does beside its settings. */
export interface Wanted {
  plan: string;
  precision: string;
  /** Whether the kernel has loaded nbdist. */
  loaded: boolean;
  /** Whether the machine has no GPU. */
  cpu: boolean;
}

/** The cell that starts ranks with these settings; an empty text is the default. */
export function sourceOf(fields: [setting: Setting, text: string][], { plan, precision, loaded, cpu }: Wanted): string {
  const values = fields.map(([setting, text]) => [setting, text.trim() || (cpu && setting.name === "num_processes" ? CPU_RANKS : "")] as const);
  const flags = values.flatMap(([{ flag }, value]) => (value === "" ? [] : [`${flag} ${value}`]));
  const lines = loaded ? [] : ["%load_ext nbdist"];
  lines.push(["%distributed start", ...flags].join(" "));
  if (plan !== "") lines.push(`%distributed plan ${plan}${precision === precisions[0] ? "" : ` --precision ${precision}`}`);
  return lines.join("\n");
}

function inputOf(setting: Setting): HTMLInputElement {
  const input = make("input", "start-input");
  if (setting.name === "num_processes") input.inputMode = "numeric";
  fit(setting, input, false);
  return input;
}

/** Say what an empty field means where there are GPUs, or none, which leaves nothing to choose from. */
function fit(setting: Setting, input: HTMLInputElement, cpu: boolean): void {
  const counts = setting.name === "num_processes";
  input.placeholder = cpu && counts ? CPU_RANKS : setting.empty;
  input.title = cpu && counts ? START_CAPTION_CPU : setting.caption;
  if (setting.name === "gpus" && input.parentElement !== null) input.parentElement.hidden = cpu;
}

/** Whether a text may be this setting's value. */
export function fits(setting: Setting, text: string): boolean {
  return text === "" || new RegExp(setting.pattern).test(text);
}

function field(label: string, input: HTMLElement): HTMLLabelElement {
  return make("label", "start-field", make("span", "start-label", label), input);
}
