/**
 * A list of any number of lines, of which the page holds only those in view. It stays at its end while it grows, until
 * the reader scrolls up.
 */

import { make } from "../words";
import { colored } from "./colored";
import type { Rows } from "./rank_text";

const MOST_PIXELS = 8_000_000; // browsers draw no taller elements; a longer list then scrolls by several lines at a time
const BEYOND = 20; // lines that are drawn above and below what is seen

export class LineList {
  readonly element = make("div", "lines");
  private readonly space = make("div", "lines-space");
  private readonly text = make("pre", "lines-text");
  private lines: Rows = [];
  private lineHeight = 0;
  private following = true;
  private end = -1; // where we have scrolled to
  private drawn = "";
  private readonly resized = new ResizeObserver(() => {
    if (this.following) this.toEnd();
    this.draw();
  });

  /** @param onFollow - Called when the list begins or ceases to stay at its end. */
  constructor(private readonly onFollow: () => void = () => undefined) {
    this.element.tabIndex = 0;
    this.space.append(this.text);
    this.element.append(this.space);
    this.element.addEventListener("scroll", this.onScroll, { passive: true });
    this.resized.observe(this.element);
  }

  /** Whether it stays at its end. */
  get follow(): boolean {
    return this.following;
  }

  set follow(wanted: boolean) {
    this.following = wanted;
    this.onFollow();
    if (wanted) this.toEnd();
    this.draw();
  }

  /** Show these lines in place of the last ones. */
  show(lines: Rows): void {
    this.lines = lines;
    if (!this.element.isConnected) return;
    this.lineHeight ||= parseFloat(getComputedStyle(this.text).lineHeight);
    this.space.style.height = `${Math.min(MOST_PIXELS, lines.length * this.lineHeight)}px`;
    if (this.following) this.toEnd();
    this.draw();
  }

  dispose(): void {
    this.resized.disconnect();
  }

  private toEnd(): void {
    this.element.scrollTop = this.element.scrollHeight;
    this.end = this.element.scrollTop;
  }

  private readonly onScroll = (): void => {
    const { scrollTop, scrollHeight, clientHeight } = this.element;
    if (scrollTop !== this.end) {
      // the reader has scrolled, not we
      const following = scrollTop + clientHeight >= scrollHeight - 2;
      if (following !== this.following) {
        this.following = following;
        this.onFollow();
      }
    }
    this.end = -1;
    this.draw();
  };

  private readonly draw = (): void => {
    const { scrollTop, clientHeight } = this.element;
    const { lines, lineHeight } = this;
    if (lineHeight === 0) return;
    const seen = Math.ceil(clientHeight / lineHeight) + 1;
    const full = lines.length * lineHeight;
    let first = Math.max(0, Math.floor(scrollTop / lineHeight) - BEYOND);
    let top = first * lineHeight;
    if (full > MOST_PIXELS) {
      first = Math.round((scrollTop / (MOST_PIXELS - clientHeight)) * (lines.length - seen + 1));
      top = scrollTop;
    }
    const shown = lines.slice(first, first + seen + (full > MOST_PIXELS ? 0 : 2 * BEYOND));
    this.text.style.transform = `translateY(${top}px)`;
    const drawn = shown.join("\n");
    if (drawn === this.drawn) return; // a selection stays
    this.drawn = drawn;
    this.text.replaceChildren(...shown.flatMap((line) => [...colored(line), "\n"]));
  };
}
