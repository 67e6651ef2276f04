/**
 * The form that starts ranks: it writes a cell and runs it, so the notebook stays the record of what was done.
 */

import { make, option, write } from "../words";
import { addAndRun } from "./add_cell";
import type { Modules, NotebookPanel } from "./jupyter";
import type { Link } from "./link";
import { isReadOnly } from "./read_only";
import { precisions, strategies } from "./plan_words.json";
import {
  BAD_COUNT,
  BAD_GPUS,
  DEVICES,
  DEVICES_CAPTION,
  DEVICES_EMPTY,
  PLAN,
  PLAN_CAPTION,
  PLAN_UNSET,
  PRECISION,
  READ_ONLY,
  START,
  START_CAPTION,
  START_CAPTION_CPU,
  START_EMPTY,
  START_LEGEND,
  START_NOTE,
  WRITE_AND_RUN,
  WRITES,
} from "./strings";

const MOST = 1024;
const GPUS = /^\d+(,\d+)*$/;

export class StartForm {
  readonly element = make("form", "start");
  panel: NotebookPanel | null = null;
  private readonly count = make("input", "start-input");
  private readonly gpus = make("input", "start-input");
  private readonly gpusField = field(DEVICES, this.gpus);
  private readonly plan = make("select", "start-input");
  private readonly precision = make("select", "start-input");
  private readonly preview = make("pre", "start-preview");
  private readonly problem = make("p", "start-problem");
  private readonly submit = make("button", "sidebar-button", WRITE_AND_RUN);
  private readonly starting = new WeakSet<NotebookPanel>(); // notebooks whose added cell has not ended
  private loaded = false;
  private known = "";

  constructor(private readonly lab: Modules) {
    this.count.inputMode = "numeric";
    this.count.placeholder = START_EMPTY;
    this.count.title = START_CAPTION;
    this.gpus.placeholder = DEVICES_EMPTY;
    this.gpus.title = DEVICES_CAPTION;
    this.plan.title = PLAN_CAPTION;
    const offered = strategies.filter((name) => name !== "none"); // the plan form below has it
    this.plan.append(option("", PLAN_UNSET), ...offered.map((name) => option(name, name)));
    this.precision.append(...precisions.map((name) => option(name, name)));
    this.problem.setAttribute("role", "alert");
    const fields = [field(START_LEGEND, this.count), this.gpusField, field(PLAN, this.plan), field(PRECISION, this.precision)];
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
      this.count.placeholder = gpus === 0 ? "2" : START_EMPTY;
      this.count.title = gpus === 0 ? START_CAPTION_CPU : START_CAPTION;
      this.gpusField.hidden = gpus === 0;
    }
    this.check();
  }

  /** The cell that the form describes. */
  private get source(): string {
    const count = this.count.value.trim() || (this.known === "0" ? "2" : "");
    const gpus = this.gpusField.hidden ? "" : this.gpus.value.trim();
    const start = ["%distributed start", count && `-n ${count}`, gpus && `--gpus ${gpus}`].filter(Boolean).join(" ");
    const lines = this.loaded ? [start] : ["%load_ext nbdist", start];
    if (this.plan.value !== "") {
      const precision = this.precision.value === precisions[0] ? "" : ` --precision ${this.precision.value}`;
      lines.push(`%distributed plan ${this.plan.value}${precision}`);
    }
    return lines.join("\n");
  }

  private readonly check = (): void => {
    const count = this.count.value.trim();
    const gpus = this.gpus.value.trim();
    let problem = "";
    if (count !== "" && !(/^\d+$/.test(count) && Number(count) >= 1 && Number(count) <= MOST)) problem = BAD_COUNT;
    else if (gpus !== "" && !GPUS.test(gpus)) problem = BAD_GPUS;
    else if (this.panel !== null && isReadOnly(this.panel)) problem = READ_ONLY;
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

function field(label: string, input: HTMLElement): HTMLLabelElement {
  return make("label", "start-field", make("span", "start-label", label), input);
}
