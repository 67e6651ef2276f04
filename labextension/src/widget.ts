/**
 * The panel as an anywidget: connects `view` with the kernel, and hides the copy that the notebook keeps.
 */

import * as strings from "./strings";
import { createView, type Frame, type Message, type Wish } from "./view";

/** What anywidget hands over, as far as it is used here. */
interface Model {
  get(name: "frame"): Frame;
  on(event: "change:frame", listener: () => void): void;
  on(event: "msg:custom", listener: (message: Message) => void): void;
  off(event: string, listener: (message: Message) => void): void;
  send(wish: Wish): void;
  widget_manager?: { kernel?: Kernel | null };
}

/** What JupyterLab has of a kernel; other front ends have less. */
interface Kernel {
  supportsSubshells?: boolean;
  statusChanged?: Signal;
  createComm?(target: string): Comm;
}

/** One of Lumino's, as far as it is used here. */
interface Signal {
  connect(slot: (sender: unknown, status: string) => void): unknown;
  disconnect(slot: (sender: unknown, status: string) => void): unknown;
}

interface Comm {
  open(data: { id: string }): unknown;
  send(wish: Wish): unknown;
  close(): unknown;
  readonly isDisposed: boolean;
}

const TARGET = "nbdist.panel";
// By the widget's own comm: two need the kernel's main thread; the thread of the line may end before it hears the last.
const WAIT: readonly string[] = ["snapshot", "peak", "closed"];
const GONE: readonly string[] = ["restarting", "autorestarting", "dead"]; // states of a kernel that has lost the panel

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const line = directLine(model);
  const send = (wish: Wish): boolean => {
    const direct = line?.isDisposed === false && !WAIT.includes(wish.type);
    try {
      (direct ? line : model).send(wish);
    } catch {
      view.receive({ type: "note", text: strings.kernelEnded });
    }
    return direct;
  };
  const view = createView(el, send);
  const load = (): void => {
    view.load(model.get("frame"));
  };
  const receive = (message: Message): void => {
    view.receive(message);
  };
  const onStatus = (_: unknown, status: string): void => {
    if (GONE.includes(status)) view.lose();
  };
  const statuses = model.widget_manager?.kernel?.statusChanged;
  statuses?.connect(onStatus);
  load();
  model.on("change:frame", load);
  model.on("msg:custom", receive);
  send({ type: "opened", value: null });
  const showCopy = hideCopy(model.get("frame").id);
  const leave = (): void => {
    send({ type: "closed", value: null });
  };
  window.addEventListener("pagehide", leave); // a page that is reloaded or left does not call what is returned here
  return () => {
    window.removeEventListener("pagehide", leave);
    statuses?.disconnect(onStatus);
    model.off("change:frame", load);
    model.off("msg:custom", receive);
    leave();
    if (line?.isDisposed === false) line.close();
    view.dispose();
    showCopy();
  };
}

/**
 * What the kernel hears while a cell runs, too: a comm that the page opens and the kernel does not send on.
 * The widget's own is answered when the cell has ended.
 */
function directLine(model: Model): Comm | null {
  const kernel = model.widget_manager?.kernel;
  if (kernel?.supportsSubshells !== true || kernel.createComm === undefined) return null;
  const comm = kernel.createComm(TARGET);
  comm.open({ id: model.get("frame").id });
  return comm;
}

/** Hide the copy without JavaScript as long as this view lives. Returns what shows it again. */
function hideCopy(id: string): () => void {
  const copy = `[data-nbdist-panel="${CSS.escape(id)}"]`;
  const style = document.createElement("style");
  style.textContent = `${copy}, .jp-OutputArea-child:has(${copy}) { display: none }`;
  document.head.append(style);
  return () => {
    style.remove();
  };
}

export default { render };
