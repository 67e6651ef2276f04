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
    await new Promise((resolve) => setTimeout(resolve));
    if (isOff()) return null;
  }
}
