/**
 * The panel as an anywidget: connects `view` with the widget's model, and hides the copy that the notebook keeps.
 */

import { createView, type Frame, type Message, type Wish } from "./view";

/** What anywidget hands over, as far as it is used here. */
interface Model {
  get(name: "frame"): Frame;
  on(event: "change:frame", listener: () => void): void;
  on(event: "msg:custom", listener: (message: Message) => void): void;
  off(event: string, listener: (message: Message) => void): void;
  send(wish: Wish): void;
}

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const view = createView(el, (wish) => {
    model.send(wish);
  });
  const load = (): void => {
    view.load(model.get("frame"));
  };
  const receive = (message: Message): void => {
    view.receive(message);
  };
  load();
  model.on("change:frame", load);
  model.on("msg:custom", receive);
  model.send({ type: "opened", value: null });
  const showCopy = hideCopy(model.get("frame").id);
  return () => {
    model.off("change:frame", load);
    model.off("msg:custom", receive);
    model.send({ type: "closed", value: null });
    view.dispose();
    showCopy();
  };
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
