// Small jobs that are done together.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Batch } from "../../build/front_end/slices.mjs";

const reported = [];
globalThis.reportError = (error) => reported.push(error.message); // browsers have it, Node does not

test("jobs asked for together are done in their order", async () => {
  const batch = new Batch(1);
  const done = [];
  await new Promise((resolve) => {
    for (const name of ["one", "two", "three"]) {
      batch.add(async () => {
        if (done.push(name) === 3) resolve();
      });
    }
  });
  assert.deepEqual(done, ["one", "two", "three"]);
});

test("a job that goes on for long does not keep the next one waiting", async () => {
  const batch = new Batch(1);
  await new Promise((resolve) => {
    batch.add(() => new Promise(() => {}));
    batch.add(async () => resolve());
  });
});

test("a job that fails is reported, and the next one is done", async () => {
  const batch = new Batch(1);
  await new Promise((resolve) => {
    batch.add(async () => {
      throw new Error("the first");
    });
    batch.add(async () => resolve());
  });
  assert.deepEqual(reported, ["the first"]);
});

test("a job of a job comes in the next batch", async () => {
  const batch = new Batch(1);
  await new Promise((resolve) => {
    batch.add(async () => {
      batch.add(async () => resolve());
    });
  });
});
