/**
 * A list of whole numbers that grows, four bytes each.
 */

export class Numbers {
  length = 0;
  private held = new Uint32Array(16);

  at(index: number): number {
    return this.held[index] ?? 0;
  }

  push(number: number): void {
    if (this.length === this.held.length) {
      const larger = new Uint32Array(2 * this.length);
      larger.set(this.held);
      this.held = larger;
    }
    this.held[this.length++] = number;
  }

  /** Forget those from here on. */
  cut(length: number): void {
    this.length = Math.min(length, this.length);
  }
}
