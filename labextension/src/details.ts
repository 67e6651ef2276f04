/**
 * One rank closely: everything that is known of it, and what can be asked for.
 */

import type { RankRow } from "./generated/wire";
import { held, onGpu } from "./state";
import { partName } from "./row";
import * as strings from "./strings";
import { badgeOf, degrees, make, milliseconds, nameOf, partOf, percent, size, speed, stateOf, watts } from "./words";

/** The card below the ranks. */
export class Details {
  readonly element = make("section", "details");
  private readonly title = make("strong", "");
  private readonly facts = make("div", "facts");
  private readonly snapshot = make("button", "button");
  private drawn = "";

  constructor(onSnapshot: () => void, onClose: () => void) {
    const close = make("button", "button", strings.close);
    const buttons = make("span", "buttons", this.snapshot, close);
    this.element.append(make("div", "bar-of-buttons", this.title, buttons), this.facts);
    this.element.setAttribute("aria-live", "off");
    this.snapshot.addEventListener("click", onSnapshot);
    close.addEventListener("click", onClose);
    this.hide();
  }

  hide(): void {
    this.element.hidden = true;
  }

  draw(rank: RankRow, node: string): void {
    this.element.hidden = false;
    const facts = factsOf(rank, node);
    const now = JSON.stringify(facts);
    if (now === this.drawn) return;
    this.drawn = now;
    this.title.textContent = nameOf(rank);
    this.element.setAttribute("aria-label", nameOf(rank));
    this.snapshot.textContent = strings.snapshotOf(nameOf(rank));
    this.snapshot.disabled = rank.state === "dead";
    this.facts.replaceChildren(...facts.map(([label, value]) => fact(label, value)));
  }
}

function fact(label: string, value: string): HTMLElement {
  return make("div", "fact", make("span", "label", label), make("span", "", value));
}

function factsOf(rank: RankRow, node: string): [label: string, value: string][] {
  const { facts: labels } = strings;
  const facts: [string, string][] = [
    [labels.device, [rank.device, rank.gpu].filter(Boolean).join(", ")],
    [labels.process, [rank.pid.toString(), node].filter(Boolean).join(" on ")],
    [labels.state, [stateOf(rank), rank.doing].filter(Boolean).join(": ")],
    ...(onGpu(rank) ? gpuMemory(rank) : cpuMemory(rank)),
    [labels.cpu, percent(rank.cpu)],
  ];
  if (rank.step !== null) {
    facts.push([labels.step, milliseconds(rank.step)], [labels.work, milliseconds(rank.work)]);
    facts.push([labels.speed, rank.mark + speed(rank.flops)], [labels.mfu, rank.mark + percent(rank.mfu, 1)]);
  }
  if (rank.badges.length > 0) facts.push([labels.worthALook, rank.badges.map(([, words]) => badgeOf(words)).join(", ")]);
  if (rank.why !== "") facts.push([labels.unknown, rank.why]);
  return facts;
}

function gpuMemory(rank: RankRow): [label: string, value: string][] {
  const { facts: labels } = strings;
  return [
    [labels.tensors, size(rank.allocated)],
    [labels.peakOfTensors, size(rank.peak)],
    [labels.cache, size(rank.cache)],
    [labels.nonTorch, size(rank.non_torch)],
    ...(rank.process === null ? [] : [[strings.parts.process, size(rank.process)] as [string, string]]),
    [partName(rank, "others"), size(rank.others)],
    [strings.parts.kept, size(rank.kept)],
    [labels.utilization, percent(rank.utilization)],
    [labels.temperature, degrees(rank.temperature)],
    [labels.power, rank.power_limit === null ? watts(rank.power) : `${watts(rank.power)} of ${watts(rank.power_limit)}`],
  ];
}

function cpuMemory(rank: RankRow): [label: string, value: string][] {
  return [[strings.facts.own, partOf(held(rank), rank.total)]];
}
