/**
 * A notebook in a page whose kernel has nbdist: it hears what a link sends, and answers in the generated types.
 *
 * Timers are the test's: nothing here waits.
 */

import type { CellOnRanks, Greeting, News, PageCall, PageOpening, PageReply, SessionState } from "../src/generated/wire";
import { PAGE_PROTOCOL } from "../src/generated/wire";
import type { Kernel, NotebookPanel } from "../src/lab/jupyter";
import type { KernelMessage } from "../src/kernel_line";

type Slot = (sender: unknown, value: never) => void;

/** A signal as JupyterLab's. */
class Signal {
  private readonly slots = new Set<Slot>();

  readonly connect = (slot: Slot): boolean => {
    this.slots.add(slot);
    return true;
  };

  readonly disconnect = (slot: Slot): boolean => this.slots.delete(slot);

  emit(value?: unknown): void {
    for (const slot of [...this.slots]) slot(this, value as never);
  }
}

interface Sent {
  header: { msg_type: string };
  content: { comm_id: string; target_name?: string; data: unknown };
}

/** A session of two ranks that runs these cells. */
export function session(cells: CellOnRanks[] = []): SessionState {
  return { ranks: 2, devices: ["cpu"], dead: [], broken: "", cells, auto: false, gpus: 0, session: "s", stopped: false };
}

/** The kernel's end of the line, the notebook around it, and the server's heartbeat. */
export class FakeKernel {
  /** What has opened the line that is open; null: none is. */
  opening: PageOpening | null = null;
  /** What the page has asked for and wished, in its order. */
  readonly calls: PageCall[] = [];
  connectionStatus = "connected";
  status = "idle";
  isDisposed = false;
  readonly username = "";
  readonly clientId = "page";
  readonly id = "kernel";
  readonly iopubMessage = new Signal();
  readonly heartbeat = { silent: false, heard: (): void => undefined, watch: () => (): void => undefined };
  private readonly changed = new Signal();
  private readonly connection = new Signal();
  private readonly statuses = new Signal();
  private readonly disposed = new Signal();
  private comm = "";

  /** @param source - The notebook's only cell. */
  constructor(
    private readonly source = "%%distributed",
    private readonly knows = true,
  ) {}

  get panel(): NotebookPanel {
    const cell = { model: { sharedModel: { getSource: () => this.source } } };
    const { changed, connection, statuses, disposed } = this;
    const sessionContext = {
      isReady: true,
      session: { kernel: this as unknown as Kernel },
      kernelChanged: changed,
      connectionStatusChanged: connection,
      statusChanged: statuses,
    };
    const panel = { id: "panel", isDisposed: false, disposed, content: { widgets: [cell] }, sessionContext, context: { ready: Promise.resolve() } };
    return panel as unknown as NotebookPanel;
  }

  sendControlMessage({ header, content }: Sent): { done: Promise<unknown> } {
    if (header.msg_type === "comm_open") {
      this.comm = content.comm_id;
      this.opening = content.data as PageOpening;
      if (this.knows) this.greet();
    } else if (header.msg_type === "comm_msg") {
      this.calls.push(content.data as PageCall);
    } else {
      this.opening = null;
    }
    return { done: Promise.resolve() };
  }

  reconnect(): Promise<void> {
    return Promise.resolve();
  }

  greet(protocol = PAGE_PROTOCOL): void {
    this.say({ type: "greeting", protocol, version: "1.0" } satisfies Greeting);
  }

  say(news: News): void {
    this.emit({ header: { msg_type: "comm_msg" }, parent_header: {}, content: { comm_id: this.comm, data: news } });
  }

  /** Answer a request by its id. */
  reply(id: number, answer: Partial<PageReply> = {}): void {
    const nothing = { text: "", failed: false, log: null, variables: null, figures: null, plan: null, draft: null };
    this.say({ type: "reply", id, state: session(), ...nothing, ...answer });
  }

  endCell(): void {
    this.emit({ header: { msg_type: "status" }, parent_header: { msg_type: "execute_request" }, content: { execution_state: "idle" } });
  }

  restart(): void {
    this.statuses.emit("restarting");
  }

  cut(): void {
    this.connectionStatus = "connecting";
    this.connection.emit();
  }

  connect(): void {
    this.connectionStatus = "connected";
    this.connection.emit();
  }

  close(): void {
    this.disposed.emit();
  }

  private emit(message: KernelMessage): void {
    this.iopubMessage.emit(message);
  }
}
