/**
 * The plan as a form: `%distributed plan` with all its settings. It writes a cell and runs it, so the notebook stays the record.
 *
 * Names, values, words and refusals are the kernel's; nothing here knows which settings there are.
 */

import type { PlanField } from "../generated/wire";
import { make, option, write } from "../words";
import { addAndRun } from "./add_cell";
import type { Modules } from "./jupyter";
import type { Link, Request } from "./link";
import { isReadOnly } from "./read_only";
import * as words from "./strings";

const REST = 300; // milliseconds without a key until the kernel is asked

type Input = HTMLInputElement | HTMLSelectElement;

export class PlanForm {
  readonly element = make("details", "plan", make("summary", "machine-title", words.PLAN_TITLE));
  private readonly form = make("form", "plan-form");
  private readonly settings = make("div", "plan-settings");
  private readonly preview = make("pre", "start-preview");
  private readonly problem = make("p", "start-problem");
  private readonly submit = make("button", "sidebar-button", words.PLAN_RUN);
  private readonly model = named(words.ESTIMATE_MODEL, "model");
  private readonly batch = named(words.ESTIMATE_BATCH, "batch");
  private readonly estimate = make("button", "sidebar-button", words.ESTIMATE);
  private readonly needs = make("p", "start-note", words.ESTIMATE_NEEDS);
  private readonly estimated = make("pre", "start-preview");
  private readonly old = make("p", "start-note", words.ESTIMATE_OLD);
  private readonly inputs = new Map<PlanField, Input>();
  private link: Link | null = null;
  private ended = -1; // how many cells had ended when the plan was read
  private line = ""; // what would be added
  private asked = 0; // counts questions, of which only the last one's answer is shown
  private estimates = 0; // likewise
  private clock = 0;

  constructor(private readonly lab: Modules) {
    this.problem.setAttribute("role", "alert");
    this.estimated.setAttribute("role", "status");
    this.estimate.type = "button";
    this.form.append(this.settings, this.preview, this.problem, this.submit);
    this.form.append(field(words.ESTIMATE_MODEL, this.model), field(words.ESTIMATE_BATCH, this.batch), this.needs, this.estimate);
    this.form.append(this.estimated, this.old);
    this.element.append(this.form);
    this.element.addEventListener("toggle", () => void this.read());
    this.settings.addEventListener("input", this.changed);
    this.form.addEventListener("input", this.drawEstimate);
    this.estimate.addEventListener("click", () => void this.ask());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.run();
    });
    this.forget();
  }

  /** Show that of this notebook; a cell that has ended may have changed it. */
  draw(link: Link | null): void {
    this.element.hidden = (link?.state ?? null) === null;
    if (link !== this.link || this.element.hidden) this.forget();
    this.link = link;
    if (!this.element.hidden && link?.ended !== this.ended) void this.read();
  }

  private forget(): void {
    this.asked++;
    this.estimates++;
    this.ended = -1;
    this.line = "";
    this.inputs.clear();
    this.settings.replaceChildren();
    for (const each of [this.preview, this.problem, this.estimated]) write(each, "");
    for (const each of [this.preview, this.estimated, this.old]) each.hidden = true;
    this.submit.disabled = true;
    this.drawEstimate();
  }

  /** What the reader has changed is kept. */
  private async read(): Promise<void> {
    const { link } = this;
    if (link === null || !this.element.open || this.element.hidden || Object.keys(this.edits).length > 0) return;
    this.ended = link.ended;
    const mine = ++this.asked;
    const { plan, text } = await link.ask({ do: "plan" });
    if (mine !== this.asked || link !== this.link) return;
    write(this.problem, text);
    if (plan === null) return;
    this.fill(plan);
    this.drawDraft("", words.PLAN_SAME);
  }

  private fill(plan: PlanField[]): void {
    const open = new Set([...this.settings.querySelectorAll("details")].filter((each) => each.open).map((each) => each.dataset["group"]));
    this.inputs.clear();
    for (const setting of plan) this.inputs.set(setting, inputOf(setting));
    const groups = [...new Set(plan.map((setting) => setting.group))];
    this.settings.replaceChildren(...groups.flatMap((group) => this.group(group, open.has(group))));
    this.drawFields();
  }

  private group(name: string, open: boolean): HTMLElement[] {
    const fields = [...this.inputs].filter(([{ group }]) => group === name).map(([setting, input]) => field(words.settingName(setting.name), input));
    if (name === "") return fields;
    const element = make("details", "plan-group", make("summary", "plan-group-title", name), ...fields);
    element.dataset["group"] = name;
    element.open = open;
    return [element];
  }

  /** What the reader has changed, as text, by setting. */
  private get edits(): Record<string, string> {
    return editsOf([...this.inputs].map(([setting, input]) => [setting, input.value]));
  }

  private readonly changed = (): void => {
    this.drawFields();
    this.old.hidden = this.estimated.hidden;
    this.submit.disabled = true;
    window.clearTimeout(this.clock);
    this.clock = window.setTimeout(() => void this.check(), REST);
  };

  private async check(): Promise<void> {
    const { link } = this;
    if (link === null) return;
    const mine = ++this.asked;
    const { draft, text } = await link.ask({ do: "plan-draft", settings: this.edits });
    if (mine !== this.asked || link !== this.link) return;
    if (draft === null) this.drawDraft("", "", text);
    else this.drawDraft(draft.line, draft.line === "" ? words.PLAN_SAME : [draft.line, "", ...draft.changes].join("\n"));
  }

  private async run(): Promise<void> {
    const { link, line } = this;
    if (link === null || line === "" || this.submit.disabled) return;
    this.drawDraft("", line);
    await addAndRun(this.lab, link.panel, line);
    for (const [setting, input] of this.inputs) input.value = setting.value; // what the cell has done is read anew
    void this.read();
  }

  private async ask(): Promise<void> {
    const { link } = this;
    if (link === null) return;
    const mine = ++this.estimates;
    const request: Request = { do: "estimate", settings: this.edits, model: this.model.value, batch: this.batch.value };
    this.show(words.WORKING, false);
    const { text, failed } = await link.ask(request);
    if (mine === this.estimates) this.show(text, failed);
  }

  // --- drawing

  /** Settings that the strategy has no use for are not shown, unless they are set. */
  private drawFields(): void {
    const strategy = [...this.inputs].find(([{ name }]) => name === "strategy")?.[1].value ?? "";
    for (const [setting, input] of this.inputs) {
      const row = input.parentElement;
      if (row !== null) row.hidden = isOfNoUse(setting, input.value, strategy);
      input.title = captionOf(setting, strategy);
      input.classList.toggle("nbdist-changed", input.value.trim() !== setting.value);
    }
    for (const group of this.settings.querySelectorAll("details")) {
      group.hidden = [...group.querySelectorAll("label")].every((row) => row.hidden);
    }
  }

  private drawDraft(line: string, text: string, problem = ""): void {
    const readOnly = this.link !== null && isReadOnly(this.link.panel);
    this.line = line;
    write(this.preview, text);
    this.preview.hidden = text === "";
    write(this.problem, problem === "" && readOnly ? words.READ_ONLY : problem);
    this.submit.disabled = line === "" || readOnly;
  }

  private readonly drawEstimate = (): void => {
    const named = this.model.value.trim() !== "" && this.batch.value.trim() !== "";
    this.estimate.disabled = !named;
    this.needs.hidden = named;
  };

  private show(text: string, failed: boolean): void {
    write(this.estimated, text);
    this.estimated.hidden = false;
    this.estimated.classList.toggle("nbdist-failed", failed);
    this.old.hidden = true;
  }
}

/** What differs from the plan that was read, as text, by setting. */
export function editsOf(values: [setting: PlanField, text: string][]): Record<string, string> {
  const changed = values.filter(([setting, text]) => text.trim() !== setting.value);
  return Object.fromEntries(changed.map(([setting, text]) => [setting.name, text.trim()]));
}

/** Whether the strategy has no use for a setting, and nobody has set it. */
export function isOfNoUse(setting: PlanField, text: string, strategy: string): boolean {
  return !setting.owners.includes(strategy) && text.trim() === setting.default;
}

/** What a setting is for, and why the strategy has no use for it. */
export function captionOf(setting: PlanField, strategy: string): string {
  return setting.owners.includes(strategy) || setting.why === "" ? setting.help : `${setting.help}; ${setting.why}`;
}

function inputOf(setting: PlanField): Input {
  const input = make(setting.words.length === 0 ? "input" : "select", "start-input");
  input.append(...setting.words.map((word) => option(word, word)));
  input.value = setting.value;
  input.setAttribute("aria-label", words.settingName(setting.name));
  return input;
}

function named(label: string, example: string): HTMLInputElement {
  const input = make("input", "start-input");
  input.placeholder = example;
  input.setAttribute("aria-label", label);
  return input;
}

function field(label: string, input: HTMLElement): HTMLLabelElement {
  return make("label", "start-field", make("span", "start-label", label), input);
}
