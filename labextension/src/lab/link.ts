/**
 * A notebook's way to nbdist in its kernel.
 *
 * Opens a line only if the notebook mentions nbdist, so that other kernels are left alone: when the page has connected, and
 * after each cell as long as the kernel has not answered. Independent of what is shown.
 */

import {
  PAGE_PROTOCOL,
  PAGE_TARGET,
  type BarsNews,
  type CellRan,
  type FrameNews,
  type Greeting,
  type News,
  type PageCall,
  type PageOpening,
  type PageReply,
  type PageRequest,
  type PanelNews,
  type PanelWish,
  type SessionState,
} from "../generated/wire";
import { KernelLine, randomName, type KernelMessage } from "../kernel_line";
import { usesRanks } from "./cell_line";
import { Heartbeat } from "./heartbeat";
import type { Kernel, Modules, NotebookPanel } from "./jupyter";
import { anotherVersion, KERNEL_GONE } from "./strings";

const TICK = 1000; // milliseconds between two looks at the clock while a cell runs
const ANSWER_LIMIT = 5000; // milliseconds for an idle kernel to answer; what was on its way when the network went may be lost
const CONNECT_AGAIN = 10_000; // milliseconds between two attempts of ours to connect
const LEFT = "nbdist-left"; // in the tab's storage
const CATCH_UP_LIMIT = 120_000; // milliseconds; TCP tries again at least this often

/** A rank whose bars are shown, and who is told of them. */
interface Look {
  readonly rank: number;
  readonly onBars: (bars: BarsNews) => void;
}

/** What a page asks for. */
export type Request = WithoutId<PageRequest>;

type WithoutId<Each> = Each extends unknown ? Omit<Each, "id"> : never;

/** What a request has brought. */
export type Outcome = Omit<PageReply, "type" | "id" | "state">;

const NO_ANSWER: Outcome = { text: KERNEL_GONE, failed: true, log: null, variables: null, figures: null, plan: null, draft: null };

export class Link {
  /** How the session is; null: the kernel has not answered. */
  state: SessionState | null = null;
  /** Why there is no answer to be had; empty: there may be one. */
  trouble = "";
  /** How many cells have ended since the page was opened. */
  ended = 0;
  /** Whether ranks ran a cell of this kernel when the page first heard of them. */
  cameLate = false;
  /** Cells that this kernel has run on ranks, by their ids: of each the last run. */
  readonly ran = new Map<string, CellRan>();
  private line: KernelLine<PageOpening, PageCall> | null = null;
  private greeted = false; // whether the kernel has answered
  private kernel: Kernel | null = null;
  /** How often ranks have been replaced from this page. */
  renewed = 0;
  readonly page = randomName();
  private readonly watchers = new Set<() => void>();
  private readonly waiting = new Map<number, (outcome: Outcome) => void>();
  private last = 0;
  private clock = 0;
  private patience = 0;
  private onNews: ((news: PanelNews | FrameNews) => void) | null = null;
  private readonly looks = new Map<string, Look>(); // by cells' ids
  private told = 0;
  private fresh = false; // whether the kernel has restarted and run nothing since
  private wasCut = false; // whether the page has been without its server since the kernel last answered
  private behind = 0; // until when what the kernel has said is still on its way, although the server answers again
  private unbeat: (() => void) | null = null;
  private connectedAgain = -CONNECT_AGAIN; // when we last had JupyterLab connect
  private connecting = 0;

  constructor(
    readonly panel: NotebookPanel,
    private readonly heartbeat: Heartbeat,
    private readonly left: readonly string[],
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
    return this.line !== null && this.state === null;
  }

  /** Whether the page has lost its server, as when the network is gone: what is shown is old. */
  get cut(): boolean {
    return this.closed || (this.state !== null && (this.heartbeat.silent || Date.now() < this.behind));
  }

  /** Whether the page's connection is closed. JupyterLab makes another one, and what came in between may be lost. */
  get closed(): boolean {
    return this.state !== null && this.kernel?.connectionStatus !== "connected";
  }

  /** Whether the notebook has no kernel any more, as when its server was restarted. */
  get kernelGone(): boolean {
    const { sessionContext } = this.panel;
    return sessionContext.isReady && (this.kernel === null || this.kernel.isDisposed || this.kernel.status === "dead");
  }

  /** Call this when something has changed. Returns what ends it. */
  watch(watcher: () => void): () => void {
    this.watchers.add(watcher);
    return () => this.watchers.delete(watcher);
  }

  /** Have the kernel do something, also while a cell runs. */
  async ask(request: Request): Promise<Outcome> {
    const { line } = this;
    if (line === null) return NO_ANSWER;
    const id = ++this.last;
    const outcome = await new Promise<Outcome>((resolve) => {
      this.waiting.set(id, resolve);
      line.send({ request: { id, ...request } });
    });
    if (request.do === "heal" || request.do === "restart") {
      this.renewed++;
      this.tell();
    }
    return outcome;
  }

  /** Tell the kernel what the reader of the panel wants. Returns whether it heard. */
  wish(wish: PanelWish): boolean {
    this.line?.send({ wish });
    return this.line !== null;
  }

  /** Have the kernel send the panel's news, until `unfollow`. */
  follow(onNews: (news: PanelNews | FrameNews) => void): void {
    this.onNews = onNews;
    if (this.greeted) this.wish({ type: "opened" });
  }

  unfollow(): void {
    if (this.onNews === null) return;
    this.onNews = null;
    if (this.greeted) this.wish({ type: "closed" });
  }

  /** Have the kernel tell what the progress bars of this rank show in a cell; null: no longer. */
  look(id: string, rank: number | null, onBars: (bars: BarsNews) => void): void {
    if (rank === null) this.looks.delete(id);
    else this.looks.set(id, { rank, onBars });
    if (this.greeted) this.line?.send({ look: { id, rank } });
  }

  /** Seconds since the kernel has told the state. */
  get age(): number {
    return (Date.now() - this.told) / 1000;
  }

  // --- the kernel

  private readonly changeKernel = (): void => {
    this.kernel?.iopubMessage.disconnect(this.heard);
    this.line?.close();
    this.lose();
    this.cameLate = false;
    this.kernel = this.panel.sessionContext.session?.kernel ?? null;
    this.kernel?.iopubMessage.connect(this.heard);
    this.open();
  };

  private readonly connected = (): void => {
    if (this.kernel?.connectionStatus === "connected") this.resume();
    else this.wasCut = this.state !== null;
    this.connectAgain();
    this.tell();
  };

  /** Have JupyterLab connect where it has given up: after seven attempts, or where a proxy has closed the connection. */
  private readonly connectAgain = (): void => {
    const { kernel } = this;
    if (this.state === null || kernel?.connectionStatus !== "disconnected" || kernel.isDisposed || this.heartbeat.silent) return;
    window.clearTimeout(this.connecting);
    const due = this.connectedAgain + CONNECT_AGAIN - performance.now();
    this.connecting = window.setTimeout(this.connectAgain, due > 0 ? due : CONNECT_AGAIN);
    if (due > 0) return;
    this.connectedAgain = performance.now();
    kernel.reconnect().catch(() => undefined); // the timer looks again
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
    const catchesUp = !this.heartbeat.silent;
    this.behind = catchesUp ? Date.now() + CATCH_UP_LIMIT : 0;
    if (catchesUp) {
      void this.ask({ do: "state" });
      window.setTimeout(this.tell, CATCH_UP_LIMIT);
    }
    this.connectAgain();
    this.tell();
  };

  private readonly statusChanged = (_: unknown, status: string): void => {
    if (status === "restarting" || status === "autorestarting" || status === "dead") {
      this.fresh = true;
      this.cameLate = false;
      this.lose();
    }
  };

  private readonly heard = (_: unknown, message: KernelMessage): void => {
    if (this.unbeat !== null) this.heartbeat.heard();
    if (this.behind > 0) {
      this.behind = 0;
      this.tell();
    }
    const { parent_header: parent, content } = message;
    if (parent.msg_type === "execute_request" && content.execution_state === "idle") {
      this.fresh = false; // each cell may be the one that loads nbdist
      this.ended++;
      this.open();
      this.tell();
    }
  };

  private open(): void {
    const { kernel } = this;
    if (this.line !== null || this.fresh || kernel?.connectionStatus !== "connected" || !this.used) return;
    const line = new KernelLine<PageOpening, PageCall>(kernel, (data) => {
      this.receive(data as News);
    });
    this.line = line;
    const opened = (heard: boolean): void => {
      if (this.line === line && !heard) this.lose(); // nbdist is not loaded there
    };
    line.open(PAGE_TARGET, { page: this.page, protocol: PAGE_PROTOCOL, left: [...this.left] }).then(opened, () => undefined);
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

  private receive(news: News): void {
    switch (news.type) {
      case "greeting":
        this.greet(news);
        break;
      case "reply":
        this.note(news.state);
        this.waiting.get(news.id)?.(news);
        this.waiting.delete(news.id);
        break;
      case "state":
        this.note(news.state);
        break;
      case "cells":
        this.noteCells(news.cells);
        break;
      case "bars":
        this.noteBars(news);
        break;
      default:
        this.onNews?.(news);
    }
  }

  /** The kernel has answered: say what is looked at. */
  private greet({ protocol, version }: Greeting): void {
    if (protocol !== PAGE_PROTOCOL) {
      this.trouble = anotherVersion(version);
      this.line?.close();
      this.lose();
      return;
    }
    this.trouble = "";
    this.greeted = true;
    if (this.onNews !== null) this.wish({ type: "opened" });
    for (const [id, { rank }] of this.looks) this.line?.send({ look: { id, rank } });
  }

  private note(state: SessionState): void {
    if (this.told === 0) this.cameLate = state.cells.length > 0;
    this.state = state;
    this.told = Date.now();
    this.unbeat ??= this.heartbeat.watch(this.heartbeatChanged);
    window.clearInterval(this.patience);
    window.clearInterval(this.clock);
    if (state.cells.length > 0) this.clock = window.setInterval(this.tell, TICK);
    this.tell();
  }

  private noteCells(cells: CellRan[]): void {
    for (const cell of cells) this.ran.set(cell.id, cell);
    this.tell();
  }

  private noteBars(news: BarsNews): void {
    const look = this.looks.get(news.id);
    if (look?.rank === news.rank) look.onBars(news);
  }

  /** Open the line again: what it said was lost. */
  private renew(): void {
    this.line?.close();
    this.lose();
    this.open();
  }

  private lose(): void {
    window.clearInterval(this.patience);
    window.clearInterval(this.clock);
    this.ran.clear();
    this.unbeat?.();
    this.unbeat = null;
    this.behind = 0;
    this.line?.forget();
    this.line = null;
    this.greeted = false;
    this.state = null;
    for (const resolve of this.waiting.values()) resolve(NO_ANSWER);
    this.waiting.clear();
    this.tell();
  }

  private readonly tell = (): void => {
    for (const watcher of this.watchers) watcher();
  };

  /** Close the line: the notebook or the page goes. */
  readonly leave = (): void => {
    this.watchers.clear();
    this.onNews = null;
    this.line?.close();
    this.lose();
  };
}

/**
 * The pages of this tab that have gone, for the next one: where they could not say goodbye, as without a connection, it does.
 * A copy of the tab gets the same, and it is as true there.
 */
function takeLeft(): string[] {
  try {
    const left = JSON.parse(sessionStorage.getItem(LEFT) ?? "[]") as string[];
    sessionStorage.removeItem(LEFT);
    return left;
  } catch {
    return []; // the browser keeps nothing
  }
}

function keepLeft(pages: string[]): void {
  try {
    sessionStorage.setItem(LEFT, JSON.stringify(pages));
  } catch {
    // likewise
  }
}

/** The links of a page's notebooks, each made when it is asked for. */
export class Links {
  private readonly links = new Map<string, Link>();
  private readonly heartbeat: Heartbeat;
  private readonly left = takeLeft();

  constructor(lab: Modules) {
    this.heartbeat = new Heartbeat(lab);
    window.addEventListener("pagehide", () => {
      for (const link of this.links.values()) link.leave();
      keepLeft([...this.links.values()].map((link) => link.page));
    });
  }

  of(panel: NotebookPanel): Link {
    let link = this.links.get(panel.id);
    if (link === undefined) {
      link = new Link(panel, this.heartbeat, this.left);
      this.links.set(panel.id, link);
      panel.disposed.connect(() => this.links.delete(panel.id));
    }
    return link;
  }
}
