/**
 * Streams of cells on ranks that have become long: only the lines in view are in the page.
 *
 * JupyterLab renders all of a stream again with each message, and lays it out again. That takes it 30 to 1,000
 * milliseconds each time when 8 ranks print 80,000 lines. Short streams, and those of other cells, are JupyterLab's.
 */

import type { Notebook, OutputModel, Renderer, RendererFactory, StreamText, TextChange } from "./jupyter";
import { LineList } from "./line_list";
import { rowsOf } from "./rank_lines";

export const LONG = 100_000; // characters
const SLICE = 50_000; // characters that are taken apart at a time
const BUDGET = 6; // milliseconds for that in a frame; the page draws and hears the kernel in the rest
const STREAMS = ["application/vnd.jupyter.stdout", "application/vnd.jupyter.stderr"];
const FIRST = 1; // before JupyterLab's own factories

/** Have long streams of this notebook's cells rendered here. */
export function takeLongStreams(notebook: Notebook): void {
  for (const type of STREAMS) {
    const factory = notebook.rendermime.getFactory(type);
    if (factory !== undefined) notebook.rendermime.addFactory(withLongTexts(factory, type), FIRST);
  }
}

function withLongTexts(factory: RendererFactory, type: string): RendererFactory {
  const createRenderer = (options: unknown): Renderer => {
    const renderer = factory.createRenderer(options);
    const short = renderer.renderModel.bind(renderer);
    let long: LongText | null = null;
    renderer.disposed.connect(() => long?.dispose());
    renderer.renderModel = async (model: OutputModel): Promise<void> => {
      const length = model.streamText?.text.length ?? 0;
      // JupyterLab renders an output before it is in its cell, and may have disposed it when it would be there.
      if (length >= LONG && !renderer.node.isConnected) await new Promise(requestAnimationFrame);
      if (length >= LONG && model.streamText !== undefined && isOnRanks(renderer)) {
        (long ??= new LongText(renderer)).show(model.streamText);
      } else if (!renderer.isDisposed) {
        long?.dispose();
        long = null;
        await short(model);
      }
    };
    return renderer;
  };
  return { safe: factory.safe, mimeTypes: [type], createRenderer };
}

function isOnRanks(renderer: Renderer): boolean {
  return renderer.node.closest(".jp-Cell")?.querySelector('.nbdist-badge-of-cell[data-place="ranks"]') instanceof Element;
}

/** A stream's lines in the place of what JupyterLab renders. */
class LongText {
  private readonly list = new LineList();
  private stream: StreamText | null = null;
  private length = 0; // of the stream, as far as it has come here
  private waiting: string[] = []; // what of that has not been taken apart
  private rows: string[] = [];
  private begun = ""; // the last of the rows, if its line has not ended
  private due = 0;

  constructor(renderer: Renderer) {
    renderer.node.classList.add("nbdist-long-text");
    renderer.node.replaceChildren(this.list.element);
  }

  /** Show this stream, and what comes to it. */
  show(stream: StreamText): void {
    if (stream === this.stream) return;
    this.stream?.changed.disconnect(this.changed);
    this.stream = stream;
    stream.changed.connect(this.changed);
    this.startOver(stream);
  }

  dispose(): void {
    cancelAnimationFrame(this.due);
    this.stream?.changed.disconnect(this.changed);
    this.list.element.parentElement?.classList.remove("nbdist-long-text");
    this.list.element.remove();
    this.list.dispose();
  }

  private readonly changed = (stream: unknown, { type, start, value }: TextChange): void => {
    if (type === "insert" && start === this.length) this.add(value);
    else this.startOver(stream as StreamText); // lines were written over
  };

  private startOver({ text }: StreamText): void {
    this.length = 0;
    this.waiting = [];
    this.rows = [];
    this.begun = "";
    this.add(text);
  }

  private add(text: string): void {
    this.length += text.length;
    this.waiting.push(text);
    this.due ||= requestAnimationFrame(this.take);
  }

  /** Take apart as much as there is time for in this frame. */
  private readonly take = (): void => {
    const end = performance.now() + BUDGET;
    while (this.waiting.length > 0 && performance.now() < end) {
      const [text = ""] = this.waiting;
      const cut = text.length > SLICE ? text.indexOf("\n", SLICE) + 1 || text.length : text.length;
      if (cut < text.length) this.waiting[0] = text.slice(cut);
      else this.waiting.shift();
      this.takeApart(this.begun + text.slice(0, cut));
    }
    this.due = this.waiting.length > 0 ? requestAnimationFrame(this.take) : 0;
    this.list.show(this.rows);
  };

  private takeApart(text: string): void {
    if (this.begun !== "") this.rows.pop();
    this.begun = text.slice(text.lastIndexOf("\n") + 1);
    for (const row of rowsOf(text)) this.rows.push(row);
  }
}
