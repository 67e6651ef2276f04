/**
 * A line to nbdist in the kernel, which hears it at once, whatever it runs: a comm over the control channel.
 *
 * What a front end's own comms send waits for the cell that runs, unless the front end and the kernel both know subshells.
 */

export interface KernelMessage {
  header: { msg_type: string };
  parent_header: { msg_type?: string };
  content: { execution_state?: string; comm_id?: string; data?: unknown };
}

type Slot = (sender: unknown, message: KernelMessage) => void;

/** What JupyterLab has of a kernel. */
export interface LineKernel {
  readonly username: string;
  readonly clientId: string;
  readonly isDisposed: boolean;
  readonly status: string;
  readonly iopubMessage: { connect(slot: Slot): unknown; disconnect(slot: Slot): unknown };
  /** Send what the kernel hears at once. `done`: it has handled it. */
  sendControlMessage(message: object, expectReply: boolean): { readonly done: Promise<unknown> };
}

/** A line that opens with `Opening` and then carries `Call`s. */
export class KernelLine<Opening extends object, Call extends object> {
  private readonly id = randomName();
  private answered = false;

  /** @param onMessage - Called with what the kernel sends. */
  constructor(
    private readonly kernel: LineKernel,
    private readonly onMessage: (data: unknown) => void = () => undefined,
  ) {}

  /**
   * Resolves when the kernel has handled it: to whether it has such a target, which it greets before. Rejects when the
   * kernel ends or restarts.
   */
  async open(target: string, data: Opening): Promise<boolean> {
    this.kernel.iopubMessage.connect(this.heard);
    await this.tell("comm_open", { target_name: target, data });
    return this.answered;
  }

  /** Returns whether there is a kernel to hear it. */
  send(data: Call): boolean {
    const handled = this.tell("comm_msg", { data });
    handled?.catch(() => undefined); // the kernel ends
    return handled !== null;
  }

  close(): void {
    this.forget();
    this.tell("comm_close", { data: {} })?.catch(() => undefined);
  }

  /** Let go of it where the kernel has, or has ended. */
  forget(): void {
    this.kernel.iopubMessage.disconnect(this.heard);
  }

  private readonly heard: Slot = (_, { header, content }) => {
    if (header.msg_type !== "comm_msg" || content.comm_id !== this.id) return;
    this.answered = true;
    this.onMessage(content.data);
  };

  private tell(type: string, content: object): Promise<unknown> | null {
    const { username, clientId: session, isDisposed, status } = this.kernel;
    if (isDisposed || status === "dead") return null;
    const header = { msg_id: randomName(), msg_type: type, username, session, date: new Date().toISOString(), version: "5.3" };
    const message = { header, parent_header: {}, metadata: {}, content: { comm_id: this.id, ...content }, channel: "control", buffers: [] };
    return this.kernel.sendControlMessage(message, false).done;
  }
}

/** A name that no other has. `crypto.randomUUID` is missing in pages that came over plain http. */
export function randomName(): string {
  return Array.from(crypto.getRandomValues(new Uint32Array(4)), (part) => part.toString(16)).join("-");
}
