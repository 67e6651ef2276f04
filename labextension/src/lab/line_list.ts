/**
 * A list of any number of lines, of which the page holds only those in view. It stays at its end while it grows, until
 * the reader scrolls up.
 */

import { make } from "../words";
import { colored } from "./colored";
import type { Rows } from "./rank_text";

const MOST_PIXELS = 8_000_000; // browsers draw no taller elements; a longer list then scrolls by several lines at a time
const BEYOND = 20; // lines that are drawn above and below what is seen

/**
 * Which of so many lines the page holds, and how far down it draws them.
 *
 * @param lineHeight - Pixels, like `scrollTop` and `clientHeight`.
 */
export function inView(lines: number, lineHeight: number, scrollTop: number, clientHeight: number): { first: number; count: number; top: number } {
  const seen = Math.ceil(clientHeight / lineHeight) + 1;
  if (lines * lineHeight > MOST_PIXELS) {
    const first = Math.round((scrollTop / (MOST_PIXELS - clientHeight)) * (lines - seen + 1));
    return { first, count: seen, top: scrollTop };
  }
  const first = Math.max(0, Math.floor(scrollTop / lineHeight) - BEYOND);
  return { first, count: seen + 2 * BEYOND, top: first * lineHeight };
}

export class LineList {
  readonly element = make("div", "lines");
  private readonly space = make("div", "lines-space");
  private readonly text = make("pre", "lines-text");
  private readonly probe = make("div", "lines-probe"); // as high as a line, and so resized with the font
  private lines: Rows = [];
  private lineHeight = 0;
  private following = true;
  private end = -1; // where we have scrolled to
  private drawn = "";
  private readonly resized = new ResizeObserver(() => {
    this.checkFont();
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
    if (lines.length === 0 && this.lines.length === 0) return; // asking for sizes has the page laid out at once
    this.lines = lines;
    if (!this.element.isConnected) return;
    if (this.lineHeight === 0) this.measure();
    this.layOut();
  }

  dispose(): void {
    this.resized.disconnect();
  }

  /** Not before there are lines: a notebook has hundreds of lists, most of which stay empty. */
  private measure(): void {
    this.lineHeight = this.measured();
    this.space.append(this.probe);
    this.resized.observe(this.probe);
  }

  private measured(): number {
    return parseFloat(getComputedStyle(this.text).lineHeight) || 0;
  }

  private layOut(): void {
    this.space.style.height = `${Math.min(MOST_PIXELS, this.lines.length * this.lineHeight)}px`;
    if (this.following) this.toEnd();
    this.draw();
  }

  /** Take lines as high as they are now. The reader's place stays. */
  private checkFont(): void {
    const { lineHeight } = this;
    if (lineHeight === 0 || !this.element.isConnected) return;
    const now = this.measured();
    if (now === 0 || now === lineHeight) return;
    this.lineHeight = now;
    // in a frame of its own: an observer must not resize what it observes
    requestAnimationFrame(() => {
      const { scrollTop } = this.element;
      this.layOut();
      if (this.following) return;
      this.element.scrollTop = (scrollTop * now) / lineHeight;
      this.draw();
    });
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
    const { first, count, top } = inView(lines.length, lineHeight, scrollTop, clientHeight);
    const shown = lines.slice(first, first + count);
    this.text.style.transform = `translateY(${top}px)`;
    const drawn = shown.join("\n");
    if (drawn === this.drawn) return; // a selection stays
    this.drawn = drawn;
    this.text.replaceChildren(...shown.flatMap((line) => [...colored(line), "\n"]));
  };
}
