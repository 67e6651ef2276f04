/**
 * Work that takes long, in slices, so that the page stays the reader's.
 */

const BUDGET = 6; // milliseconds of a slice; the page draws, and hears its reader and the kernel, in between

/** Do this work. Each of its `yield` is a place to pause. Null: it was called off at one of them. */
export async function inSlices<T>(work: Generator<void, T>, isOff: () => boolean = () => false): Promise<T | null> {
  for (;;) {
    const end = performance.now() + BUDGET;
    do {
      const { done, value } = work.next();
      if (done === true) return value;
    } while (performance.now() < end);
    await nextTask();
    if (isOff()) return null;
  }
}

/** Small jobs of many owners, done together a moment after the first is asked for: the page is laid out after each task. */
export class Batch {
  private jobs: (() => Promise<void>)[] = [];

  /** @param pause - Milliseconds from the first job to the batch. */
  constructor(private readonly pause: number) {}

  add(job: () => Promise<void>): void {
    this.jobs.push(job);
    if (this.jobs.length === 1) setTimeout(() => void this.run(), this.pause);
  }

  /** A job that takes more than its first slice goes on by itself; one that fails keeps no other from its turn. */
  private async run(): Promise<void> {
    const jobs = this.jobs.splice(0);
    let end = performance.now() + BUDGET;
    for (const job of jobs) {
      await Promise.race([job().catch(reportError), nextTask()]);
      if (performance.now() < end) continue;
      await nextTask();
      end = performance.now() + BUDGET;
    }
  }
}

async function nextTask(): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve));
}
