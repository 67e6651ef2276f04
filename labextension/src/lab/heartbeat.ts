/**
 * Whether the page's server answers.
 *
 * A network that drops packets closes no connection, so for many minutes the browser has nothing to report. While nothing
 * comes from the server, it is asked for its version, which does not count as activity.
 */

import type { Modules } from "./jupyter";

const PERIOD = 2500; // milliseconds between two looks
const QUIET = 5000; // milliseconds without a message after which the server is asked
const ANSWER_LIMIT = 5000; // milliseconds for its answer; a server that starts kernels may take a second

export class Heartbeat {
  private silence = false;
  private last = 0;
  private asking = false;
  private timer = 0;
  private readonly watchers = new Set<() => void>();

  constructor(private readonly lab: Modules) {}

  /** Whether the server has been asked and does not answer. */
  get silent(): boolean {
    return this.silence;
  }

  /** Call this when it begins or ends. Returns what ends the watch; without watchers the server is not asked. */
  watch(watcher: () => void): () => void {
    this.watchers.add(watcher);
    if (this.timer === 0) {
      this.last = performance.now();
      this.timer = window.setInterval(this.look, PERIOD);
    }
    return () => {
      this.watchers.delete(watcher);
      if (this.watchers.size === 0) this.rest();
    };
  }

  /** Something has come from the server. */
  readonly heard = (): void => {
    this.last = performance.now();
    this.note(false);
  };

  private rest(): void {
    window.clearInterval(this.timer);
    this.timer = 0;
    this.silence = false;
  }

  private readonly look = (): void => {
    const quiet = performance.now() - this.last > QUIET;
    if (quiet && !this.asking && document.visibilityState === "visible") void this.ask();
  };

  private async ask(): Promise<void> {
    const { ServerConnection } = this.lab.services;
    const settings = ServerConnection.makeSettings();
    const begun = performance.now();
    this.asking = true;
    try {
      const signal = AbortSignal.timeout(ANSWER_LIMIT);
      await ServerConnection.makeRequest(`${settings.baseUrl}api`, { method: "GET", signal }, settings);
      this.heard();
    } catch {
      if (this.last < begun) this.note(true);
    } finally {
      this.asking = false;
    }
  }

  private note(silent: boolean): void {
    if (silent === this.silence || this.timer === 0) return;
    this.silence = silent;
    for (const watcher of this.watchers) watcher();
  }
}
