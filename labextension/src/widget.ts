/**
 * The panel as an anywidget: connects `view` with the kernel, and hides the copy that the notebook keeps.
 */

import { PANEL_TARGET, type PanelFrame, type PanelNews, type PanelOpening, type PanelWish } from "./generated/wire";
import { KernelLine, type LineKernel } from "./kernel_line";
import * as strings from "./strings";
import { createView } from "./view";

/** What anywidget hands over, as far as it is used here. */
interface Model {
  get(name: "frame"): PanelFrame;
  on(event: "change:frame", listener: () => void): void;
  on(event: "msg:custom", listener: (message: PanelNews) => void): void;
  off(event: string, listener: (message: PanelNews) => void): void;
  send(wish: PanelWish): void;
  widget_manager?: { kernel?: Kernel | null };
}

/** What JupyterLab has of a kernel; other front ends have less. */
interface Kernel extends Partial<LineKernel> {
  statusChanged?: Signal;
}

/** One of Lumino's, as far as it is used here. */
interface Signal {
  connect(slot: (sender: unknown, status: string) => void): unknown;
  disconnect(slot: (sender: unknown, status: string) => void): unknown;
}

const WAIT: readonly PanelWish["type"][] = ["snapshot", "peak"]; // by the widget's own comm: they need the kernel's main thread
const GONE: readonly string[] = ["restarting", "autorestarting", "dead"]; // states of a kernel that has lost the panel

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  let line = directLine(model);
  line?.open(PANEL_TARGET, { id: model.get("frame").id }).then(
    (heard) => {
      if (!heard) line = null; // it is another kernel
    },
    () => undefined, // the kernel ends
  );
  const send = (wish: PanelWish): boolean => {
    const direct = line !== null && !WAIT.includes(wish.type);
    const heard = line !== null && direct ? line.send(wish) : sendBy(model, wish);
    if (!heard) view.receive({ type: "note", text: strings.kernelEnded });
    return direct;
  };
  const view = createView(el, send);
  const load = (): void => {
    view.load(model.get("frame"));
  };
  const receive = (message: PanelNews): void => {
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
  send({ type: "opened" });
  const showCopy = hideCopy(model.get("frame").id);
  const leave = (): void => {
    send({ type: "closed" });
  };
  window.addEventListener("pagehide", leave); // a page that is reloaded or left does not call what is returned here
  return () => {
    window.removeEventListener("pagehide", leave);
    statuses?.disconnect(onStatus);
    model.off("change:frame", load);
    model.off("msg:custom", receive);
    leave();
    line?.close();
    view.dispose();
    showCopy();
  };
}

/** Send by the widget's own comm. Returns whether there is a kernel to hear it. */
function sendBy(model: Model, wish: PanelWish): boolean {
  try {
    model.send(wish);
    return true;
  } catch {
    return false;
  }
}

/** What the kernel hears while a cell runs, too; null: the front end has none, and what it sends waits for the cell's end. */
function directLine(model: Model): KernelLine<PanelOpening, PanelWish> | null {
  const kernel = model.widget_manager?.kernel;
  return kernel?.sendControlMessage === undefined ? null : new KernelLine(kernel as LineKernel);
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
