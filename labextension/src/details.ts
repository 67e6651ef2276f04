/**
 * One rank closely: everything that is known of it, and what can be asked for.
 */

import { held, onGpu, type Rank } from "./state";
import { badgeOf, degrees, make, milliseconds, nameOf, partOf, percent, size, speed, stateOf, watts } from "./words";

/** The card below the ranks. */
export class Details {
  readonly element = make("section", "details");
  private readonly title = make("strong", "");
  private readonly facts = make("div", "facts");
  private readonly snapshot = make("button", "button");
  private drawn = "";

  constructor(onSnapshot: () => void, onClose: () => void) {
    const close = make("button", "button", "Close");
    const buttons = make("span", "buttons", this.snapshot, close);
    this.element.append(make("header", "bar-of-buttons", this.title, buttons), this.facts);
    this.element.setAttribute("aria-live", "off");
    this.snapshot.addEventListener("click", onSnapshot);
    close.addEventListener("click", onClose);
    this.hide();
  }

  hide(): void {
    this.element.hidden = true;
  }

  draw(rank: Rank, node: string): void {
    this.element.hidden = false;
    const facts = factsOf(rank, node);
    const now = JSON.stringify(facts);
    if (now === this.drawn) return;
    this.drawn = now;
    this.title.textContent = nameOf(rank);
    this.element.setAttribute("aria-label", nameOf(rank));
    this.snapshot.textContent = `Memory snapshot of ${nameOf(rank)}`;
    this.snapshot.disabled = rank.state === "dead";
    this.facts.replaceChildren(...facts.map(([label, value]) => fact(label, value)));
  }
}

function fact(label: string, value: string): HTMLElement {
  return make("div", "fact", make("span", "label", label), make("span", "", value));
}

function factsOf(rank: Rank, node: string): [label: string, value: string][] {
  const facts: [string, string][] = [
    ["device", [rank.device, rank.gpu].filter(Boolean).join(", ")],
    ["process", [rank.pid.toString(), node].filter(Boolean).join(" on ")],
    ["state", [stateOf(rank), rank.doing].filter(Boolean).join(": ")],
    ...(onGpu(rank) ? gpuMemory(rank) : cpuMemory(rank)),
  ];
  if (rank.step !== null) {
    facts.push(["step", milliseconds(rank.step)], ["speed", (rank.least ? "≥ " : "") + speed(rank.flops)]);
    facts.push(["MFU", percent(rank.mfu, 1)]);
  }
  if (rank.badges.length > 0) facts.push(["worth a look", rank.badges.map(([, words]) => badgeOf(words)).join(", ")]);
  if (rank.why !== "") facts.push(["not known", rank.why]);
  return facts;
}

function gpuMemory(rank: Rank): [label: string, value: string][] {
  return [
    ["tensors", size(rank.allocated)],
    ["peak of tensors", size(rank.peak)],
    ["torch's cache", size(rank.cache)],
    ["CUDA and NCCL", size(rank.non_torch)],
    [rank.non_torch === null ? "outside torch" : "other processes", size(rank.others)],
    ["utilization", percent(rank.utilization)],
    ["temperature", degrees(rank.temperature)],
    ["power", rank.power_limit === null ? watts(rank.power) : `${watts(rank.power)} of ${watts(rank.power_limit)}`],
  ];
}

function cpuMemory(rank: Rank): [label: string, value: string][] {
  return [
    ["memory of its own", partOf(held(rank), rank.total)],
    ["everything else in use", size(rank.others)],
  ];
}
