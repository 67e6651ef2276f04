/**
 * A notebook's way to nbdist in its kernel.
 *
 * Opens a line only if the notebook mentions nbdist, so that other kernels are left alone: when the page has connected, and
 * after each cell as long as the kernel has not answered. Knows nothing of what is shown.
 */

import { usesRanks } from "./cell_line";
import { Heartbeat } from "./heartbeat";
import type { Comm, Kernel, KernelMessage, Modules, NotebookPanel } from "./jupyter";
import { CONTROL, PROTOCOL, VIEW, type News, type PanelNews, type Reply, type Request, type SessionState } from "./messages";
import { anotherVersion, KERNEL_GONE } from "./strings";
import type { Wish } from "../view";

const TICK = 1000; // milliseconds between two looks at the clock while a cell runs
const ANSWER_LIMIT = 5000; // milliseconds for an idle kernel to answer; what goes to a comm's thread that ends is lost
const THREAD_LIMIT = 3000; // milliseconds for the kernel to start a comm's thread

/** What a request has brought. */
export type Outcome = Omit<Reply, "id" | "state">;

const NO_ANSWER: Outcome = { text: KERNEL_GONE, failed: true, log: null, variables: null, figures: null, plan: null, draft: null };

export class Link {
  /** How the session is; null: the kernel has not answered. */
  state: SessionState | null = null;
  /** Why there is no answer to be had; empty: there may be one. */
  trouble = "";
  /** How many cells have ended since the page was opened. */
  ended = 0;
  private control: Comm | null = null;
  private view: Comm | null = null;
  private kernel: Kernel | null = null;
  private readonly page = crypto.randomUUID();
  private readonly watchers = new Set<() => void>();
  private readonly waiting = new Map<number, (outcome: Outcome) => void>();
  private last = 0;
  private threaded = false; // whether the kernel hears the line while a cell runs
  private clock = 0;
  private patience = 0;
  private onNews: ((news: PanelNews) => void) | null = null;
  private told = 0;
  private fresh = false; // whether the kernel has restarted and run nothing since
  private listening = false; // whether the kernel knows the view's line
  private wasCut = false; // whether the page has been without its server since the kernel last answered
  private behind = false; // whether the server answers again, and what the kernel has said meanwhile is still on its way
  private unbeat: (() => void) | null = null;

  constructor(
    readonly panel: NotebookPanel,
    private readonly heartbeat: Heartbeat,
  ) {
    const { sessionContext } = panel;
    sessionContext.kernelChanged.connect(this.changeKernel);
    sessionContext.connectionStatusChanged.connect(this.connected);
    sessionContext.statusChanged.connect(this.statusChanged);
    panel.disposed.connect(this.leave);
    this.changeKernel();
    void panel.context.ready.then(() => {
      if (!panel.isDisposed) this.open(); // now its cells are known
    });
  }

  /** Whether this notebook has to do with nbdist. */
  get used(): boolean {
    return this.state !== null || this.panel.content.widgets.some((cell) => usesRanks(cell.model.sharedModel.getSource()));
  }

  /** Whether the kernel has been asked and has not answered: it may run a cell. */
  get asking(): boolean {
    return this.control !== null && this.state === null;
  }

  /** Whether the page has lost its server, as when the network is gone: what is shown is old. */
  get cut(): boolean {
    return this.closed || (this.state !== null && (this.heartbeat.silent || this.behind));
  }

  /** Whether the page's connection is closed. JupyterLab makes another one, and what came in between may be lost. */
  get closed(): boolean {
    return this.state !== null && this.kernel?.connectionStatus !== "connected";
  }

  /** Call this when something has changed. Returns what ends it. */
  watch(watcher: () => void): () => void {
    this.watchers.add(watcher);
    return () => this.watchers.delete(watcher);
  }

  /** Have the kernel do something, also while a cell runs. */
  async ask(request: Request): Promise<Outcome> {
    const { control } = this;
    if (control === null) return NO_ANSWER;
    const id = ++this.last;
    return new Promise((resolve) => {
      this.waiting.set(id, resolve);
      control.send({ request: { id, ...request } });
    });
  }

  /** Tell the kernel what the reader of the panel wants. Returns whether it heard. */
  wish(wish: Wish): boolean {
    this.control?.send({ wish });
    return this.control !== null;
  }

  /** Have the kernel send the panel's news, until `unfollow`. */
  follow(onNews: (news: PanelNews) => void): void {
    this.onNews = onNews;
    if (this.listening) this.wish({ type: "opened", value: null });
  }

  unfollow(): void {
    if (this.onNews === null) return;
    this.onNews = null;
    if (this.listening) this.wish({ type: "closed", value: null });
  }

  /** Seconds since the kernel has told the state. */
  get age(): number {
    return (Date.now() - this.told) / 1000;
  }

  // --- the kernel

  private readonly changeKernel = (): void => {
    this.kernel?.iopubMessage.disconnect(this.heard);
    this.lose();
    this.kernel = this.panel.sessionContext.session?.kernel ?? null;
    this.kernel?.iopubMessage.connect(this.heard);
    this.open();
  };

  private readonly connected = (): void => {
    if (this.kernel?.connectionStatus === "connected") this.resume();
    else this.wasCut = this.state !== null;
    this.tell();
  };

  /** The lines live on where only the network was gone; the server has kept what the kernel has said meanwhile. */
  private resume(): void {
    this.open();
    if (!this.wasCut) return;
    this.wasCut = false;
    void this.ask({ do: "state" });
    this.wait();
  }

  /**
   * The server has gone silent, or answers again. The kernel's connection, which carries all in its order, may take a
   * while longer than a new one: what is on its way has come when the kernel answers.
   */
  private readonly heartbeatChanged = (): void => {
    this.behind = !this.heartbeat.silent && this.threaded;
    if (this.behind) void this.ask({ do: "state" });
    this.tell();
  };

  private readonly statusChanged = (_: unknown, status: string): void => {
    if (status === "restarting" || status === "autorestarting" || status === "dead") {
      this.fresh = true;
      this.lose();
    }
  };

  /** Each cell may be the one that loads nbdist. */
  private readonly heard = (_: unknown, message: KernelMessage): void => {
    if (this.unbeat !== null) this.heartbeat.heard();
    if (this.behind) {
      this.behind = false;
      this.tell();
    }
    const { msg_type: about } = message.parent_header;
    if (about === "execute_request" && message.content.execution_state === "idle") {
      this.fresh = false;
      this.ended++;
      this.open();
      this.tell();
    }
  };

  private open(): void {
    const { kernel } = this;
    if (this.control !== null || this.fresh || kernel?.connectionStatus !== "connected" || !this.used) return;
    this.threaded = kernel.supportsSubshells === true;
    const control = kernel.createComm(CONTROL);
    this.control = control;
    control.onMsg = (message) => {
      this.receive(message.content.data as Reply);
    };
    control.onClose = () => {
      if (this.control === control) this.lose();
    };
    void openLine(kernel, control, this.page).then(() => {
      if (this.control === control) void this.ask({ do: "state" });
    });
    this.wait();
    this.tell();
  }

  /** Open the line again as long as an idle kernel does not answer. */
  private wait(): void {
    window.clearInterval(this.patience);
    this.patience = window.setInterval(() => {
      if (this.kernel?.status === "idle" && this.kernel.connectionStatus === "connected") this.renew();
    }, ANSWER_LIMIT);
  }

  /** The kernel has answered: it may speak by itself from now on. */
  private listen(kernel: Kernel): void {
    const view = kernel.createComm(VIEW);
    this.view = view;
    view.onMsg = (message) => {
      const news = message.content.data as News;
      if (news.type === "state") this.note(news.state);
      else this.onNews?.(news);
    };
    void openLine(kernel, view, this.page).then(() => {
      if (this.view !== view) return;
      this.listening = true;
      if (this.onNews !== null) this.wish({ type: "opened", value: null });
    });
  }

  private receive(reply: Reply): void {
    const { kernel } = this;
    if (reply.state.protocol !== PROTOCOL) {
      this.trouble = anotherVersion(reply.state.version);
      this.control?.close();
      this.lose();
      return;
    }
    this.trouble = "";
    if (!this.threaded && kernel?.supportsSubshells === true) {
      this.renew();
      return;
    }
    if (this.view === null && kernel !== null) this.listen(kernel);
    this.note(reply.state);
    this.waiting.get(reply.id)?.(reply);
    this.waiting.delete(reply.id);
  }

  private note(state: SessionState): void {
    this.state = state;
    this.told = Date.now();
    this.unbeat ??= this.heartbeat.watch(this.heartbeatChanged);
    window.clearInterval(this.patience);
    window.clearInterval(this.clock);
    if (state.cells.length > 0) this.clock = window.setInterval(this.tell, TICK);
    this.tell();
  }

  /** Open the line again: it was opened while a cell ran, and could not hear meanwhile, or what it said was lost. */
  private renew(): void {
    const { control } = this;
    this.lose();
    control?.close();
    this.open();
  }

  private lose(): void {
    window.clearInterval(this.patience);
    window.clearInterval(this.clock);
    if (this.view?.isDisposed === false) this.view.close();
    this.view = null;
    this.unbeat?.();
    this.unbeat = null;
    this.behind = false;
    this.listening = false;
    this.control = null;
    this.state = null;
    for (const resolve of this.waiting.values()) resolve(NO_ANSWER);
    this.waiting.clear();
    this.tell();
  }

  private readonly tell = (): void => {
    for (const watcher of this.watchers) watcher();
  };

  /** Close all lines: the notebook or the page goes. */
  readonly leave = (): void => {
    this.watchers.clear();
    this.onNews = null;
    const { control } = this;
    this.lose();
    if (control?.isDisposed === false) control.close();
  };
}

/** Open a comm in a thread of its own, which hears it while a cell runs; resolves when the kernel knows it. */
async function openLine(kernel: Kernel, comm: Comm, page: string): Promise<void> {
  if (kernel.supportsSubshells === true && comm.subshellStarted !== undefined) {
    // A reader may have switched these threads off: then it never starts.
    await Promise.race([comm.subshellStarted, new Promise((resolve) => setTimeout(resolve, THREAD_LIMIT))]);
  }
  try {
    await comm.open({ page, protocol: PROTOCOL }).done;
  } catch {
    // the kernel ends or restarts
  }
}

/** The links of a page's notebooks, each made when it is asked for. */
export class Links {
  private readonly links = new Map<string, Link>();

  private readonly heartbeat: Heartbeat;

  constructor(lab: Modules) {
    this.heartbeat = new Heartbeat(lab);
    window.addEventListener("pagehide", () => {
      for (const link of this.links.values()) link.leave();
    });
  }

  of(panel: NotebookPanel): Link {
    let link = this.links.get(panel.id);
    if (link === undefined) {
      link = new Link(panel, this.heartbeat);
      this.links.set(panel.id, link);
      panel.disposed.connect(() => this.links.delete(panel.id));
    }
    return link;
  }
}
