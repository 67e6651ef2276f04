/**
 * What stands above the ranks: how many there are and do what, the figures over all of them, pause and rate.
 */

import type { Head, Stat } from "./state";
import { make, option, write } from "./words";

const RATES: [seconds: number, words: string][] = [
  [0.25, "every 0.25 s"],
  [0.5, "every 0.5 s"],
  [1, "every second"],
  [2, "every 2 s"],
  [5, "every 5 s"],
  [15, "every 15 s"],
];
const LATE = 3; // periods without an update after which that is said

/** What a reader wants of the kernel. */
export interface Wishes {
  pause: (on: boolean) => void;
  rate: (seconds: number) => void;
}

/** The header; `element` is in the page. */
export class Header {
  readonly element = make("header", "head");
  private readonly live = make("span", "live");
  private readonly title = make("strong", "title");
  private readonly pause = make("button", "button");
  private readonly rate = make("select", "select");
  private readonly stats = make("div", "stats");
  private tiles: Tile[] = [];
  private paused = false;

  constructor(wishes: Wishes) {
    this.rate.append(...RATES.map(([seconds, words]) => option(seconds.toString(), words)));
    this.rate.setAttribute("aria-label", "Update interval");
    this.rate.addEventListener("change", () => {
      wishes.rate(Number(this.rate.value));
    });
    this.pause.addEventListener("click", () => {
      wishes.pause(!this.paused);
    });
    const buttons = make("span", "buttons", this.rate, this.pause);
    this.element.append(make("div", "bar-of-buttons", make("span", "what", this.live, this.title), buttons), this.stats);
  }

  /** @param paused - Whether the reader wants it to rest; the kernel may learn it only when its cell has ended. */
  draw(head: Head, paused: boolean): void {
    this.paused = paused;
    write(this.title, head.title);
    write(this.pause, paused ? "Resume" : "Pause");
    this.pause.disabled = head.live === "ended";
    this.pause.setAttribute("aria-pressed", paused.toString());
    this.drawRate(head.rate);
    if (this.tiles.length !== head.stats.length) {
      this.tiles = head.stats.map(() => new Tile());
      this.stats.replaceChildren(...this.tiles.map((tile) => tile.element));
    }
    head.stats.forEach((stat, index) => this.tiles[index]?.draw(stat));
  }

  /** @param silence - Seconds since the last update. */
  drawLive(head: Head, paused: boolean, silence: number): void {
    const late = silence > Math.max(LATE * head.rate, LATE);
    const now = head.live === "ended" ? "ended" : paused ? "paused" : late ? "late" : "live";
    const words = { ended: "■ session ended", paused: "‖ paused", late: `◌ silent for ${age(silence)}`, live: "● live" };
    this.live.dataset["live"] = now;
    write(this.live, words[now]);
  }

  private drawRate(seconds: number): void {
    const value = seconds.toString();
    if (![...this.rate.options].some((each) => each.value === value)) {
      this.rate.append(option(value, `every ${value} s`));
    }
    if (this.rate.value !== value && document.activeElement !== this.rate) this.rate.value = value;
  }
}

/** One figure. */
class Tile {
  readonly element = make("div", "stat");
  private readonly label = make("span", "label");
  private readonly value = make("span", "value");
  private readonly note = make("span", "note");

  constructor() {
    this.element.append(this.label, this.value, this.note);
  }

  draw([label, value, note, level]: Stat): void {
    write(this.label, label);
    write(this.value, value);
    write(this.note, level === "warn" || level === "bad" ? `⚠ ${note}` : note);
    this.element.dataset["level"] = level ?? "";
  }
}

function age(seconds: number): string {
  return seconds < 120 ? `${seconds.toFixed(0)} s` : `${(seconds / 60).toFixed(0)} min`;
}
