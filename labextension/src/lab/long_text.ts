/**
 * Streams of cells on ranks that have become long: only the lines in view are in the page.
 *
 * JupyterLab renders all of a stream again with each message, and lays it out again. That takes it 30 to 1,000
 * milliseconds each time when 8 ranks print 80,000 lines. Short streams, and those of other cells, are JupyterLab's.
 */

import type { Notebook, OutputModel, Renderer, RendererFactory } from "./jupyter";
import { LineList } from "./line_list";
import { rowsOf } from "./rank_lines";

const LONG = 100_000; // characters
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
      const { length } = textOf(model);
      // JupyterLab renders an output before it is in its cell, and may have disposed it when it would be there.
      if (length >= LONG && !renderer.node.isConnected) await new Promise(requestAnimationFrame);
      if (length >= LONG && isOnRanks(renderer)) {
        (long ??= new LongText(renderer)).show(textOf(model));
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

function textOf(model: OutputModel): string {
  return model.streamText?.text ?? "";
}

function isOnRanks(renderer: Renderer): boolean {
  return renderer.node.closest(".jp-Cell")?.querySelector('.nbdist-badge-of-cell[data-place="ranks"]') instanceof Element;
}

/** A stream's lines in the place of what JupyterLab renders. */
class LongText {
  private readonly list = new LineList();
  private taken = ""; // whole lines
  private rows: string[] = [];
  private due = 0;
  private text = "";

  constructor(renderer: Renderer) {
    renderer.node.classList.add("nbdist-long-text");
    renderer.node.replaceChildren(this.list.element);
  }

  /** Show this text, with the next frame. */
  show(text: string): void {
    this.text = text;
    this.due ||= requestAnimationFrame(() => {
      this.due = 0;
      this.take();
    });
  }

  dispose(): void {
    cancelAnimationFrame(this.due);
    this.list.element.parentElement?.classList.remove("nbdist-long-text");
    this.list.element.remove();
    this.list.dispose();
  }

  private take(): void {
    const { text } = this;
    if (!text.startsWith(this.taken)) {
      this.taken = "";
      this.rows = [];
    }
    const end = text.lastIndexOf("\n") + 1;
    for (const row of rowsOf(text.slice(this.taken.length, end))) this.rows.push(row);
    this.taken = text.slice(0, end);
    this.list.show(end === text.length ? this.rows : this.rows.concat(rowsOf(text.slice(end))));
  }
}
