/**
 * What stands above the ranks: how many there are and do what, why they are stuck, the figures over all of them and how
 * these went, pause and rate.
 */

import type { PanelHead, Stat } from "./generated/wire";
import * as strings from "./strings";
import { Strip, type Trend } from "./strip";
import { age, make, option, shortName, write } from "./words";

const RATES = [0.25, 0.5, 1, 2, 5, 15]; // seconds
const LATE = 3; // periods without an update after which that is said

/** What a reader wants of the kernel. */
export interface Wishes {
  pause: (on: boolean) => void;
  rate: (seconds: number) => void;
  peak: () => void;
}

/** The header; `element` is in the page. */
export class Header {
  readonly element = make("div", "head");
  private readonly live = make("span", "live");
  private readonly title = make("strong", "title");
  private readonly pause = make("button", "button");
  private readonly rate = make("select", "select");
  private readonly alert = make("div", "alert");
  private readonly alarm = make("span", "");
  private readonly since = make("span", "since");
  private readonly stats = make("div", "stats");
  private tiles: Tile[] = [];
  private paused = false;

  constructor(private readonly wishes: Wishes) {
    this.rate.append(...RATES.map((seconds) => option(seconds.toString(), strings.every(seconds))));
    this.rate.setAttribute("aria-label", strings.updateInterval);
    this.rate.addEventListener("change", () => {
      wishes.rate(Number(this.rate.value));
    });
    this.pause.addEventListener("click", () => {
      wishes.pause(!this.paused);
    });
    this.alarm.setAttribute("role", "alert"); // without the time, which would be said each second
    this.alert.append(this.alarm, this.since);
    const buttons = make("span", "buttons", this.rate, this.pause);
    const what = make("span", "what", this.live, this.title);
    this.element.append(make("div", "bar-of-buttons", what, buttons), this.alert, this.stats);
  }

  /** @param paused - Whether the reader wants it to rest; the kernel may learn it only when its cell has ended. */
  draw(head: PanelHead, trend: Trend, paused: boolean): void {
    this.paused = paused;
    write(this.title, head.title);
    write(this.pause, paused ? strings.resume : strings.pause);
    this.pause.setAttribute("aria-pressed", paused.toString());
    this.drawRate(head.rate);
    this.alert.hidden = head.alert === null;
    write(this.alarm, head.alert === null ? "" : `⚠ ${head.alert[0]}`);
    write(this.since, typeof head.alert?.[2] === "number" ? age(head.alert[2]) : "");
    const keys = head.stats.map(([key]) => key).join();
    if (keys !== this.tiles.map((tile) => tile.key).join()) {
      this.tiles = head.stats.map(([key]) => new Tile(key, this.wishes.peak));
      this.stats.replaceChildren(...this.tiles.map((tile) => tile.element));
    }
    head.stats.forEach((stat, index) => this.tiles[index]?.draw(stat, trend));
  }

  /**
   * @param silence - Seconds since the last update.
   * @param lost - Whether the kernel has been restarted.
   * @returns whether what is shown is of now, or rests because the reader wants it to.
   */
  drawLive(head: PanelHead, paused: boolean, silence: number, lost: boolean): boolean {
    const now = liveness(head, paused, silence, lost);
    const words = {
      lost: strings.kernelRestarted,
      ended: strings.sessionEnded,
      paused: strings.paused,
      late: strings.silentFor(age(silence)),
      live: strings.live,
    };
    this.live.dataset["live"] = now;
    this.pause.disabled = lost || head.live === "ended";
    write(this.live, words[now]);
    return now === "live" || now === "paused";
  }

  private drawRate(seconds: number): void {
    const value = seconds.toString();
    if (![...this.rate.options].some((each) => each.value === value)) {
      this.rate.append(option(value, strings.every(seconds)));
    }
    if (this.rate.value !== value && document.activeElement !== this.rate) this.rate.value = value;
  }
}

/** Of when what is shown is; the arguments are those of `drawLive`. */
export function liveness(head: PanelHead, paused: boolean, silence: number, lost: boolean): "lost" | "ended" | "paused" | "late" | "live" {
  if (lost) return "lost";
  if (head.live === "ended") return "ended";
  if (paused) return "paused";
  return silence > Math.max(LATE * head.rate, LATE) ? "late" : "live";
}

/** One figure, and behind it how it went. */
class Tile {
  readonly element = make("div", "stat");
  private readonly strip = new Strip();
  private readonly label = make("span", "label");
  private readonly value = make("span", "value");
  private readonly note = make("span", "note");
  private readonly button = make("button", "button", strings.measurePeak);

  /**
   * @param key - Which.
   * @param onPeak - What its button asks for.
   */
  constructor(
    readonly key: string,
    onPeak: () => void,
  ) {
    this.element.append(this.strip.element, this.label, this.value, this.note, this.button);
    this.button.addEventListener("click", onPeak);
  }

  draw([key, label, value, note, level, action]: Stat, trend: Trend): void {
    this.element.dataset["key"] = key;
    this.element.dataset["level"] = level ?? "";
    write(this.label, shortName(label));
    this.label.title = label;
    write(this.value, value);
    write(this.note, level === "warn" || level === "bad" ? `⚠ ${note}` : note);
    this.note.hidden = action !== "";
    this.button.hidden = action !== "peak";
    this.button.title = note;
    this.strip.draw(trend, key, label);
  }
}
