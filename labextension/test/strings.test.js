// What the extension says of a session.

import assert from "node:assert/strict";
import { test } from "node:test";

import * as words from "../../build/front_end/strings.mjs";

const cell = (number, ranks, done, step = 0) => ({ number, ranks, done, seconds: 1, step });

function session(ranks, cells = []) {
  return { ranks, devices: ["cpu"], dead: [], broken: "", cells, auto: false, stopped: false };
}

const statuses = [
  ["no ranks", session(0), ""],
  ["ranks without a cell", session(2), "2 ranks: idle"],
  ["one cell", session(4, [cell(7, 4, 1, 1340)]), "4 ranks: step 1,340, [1 of 4 done]"],
  ["several cells", session(4, [cell(7, 2, 1, 340), cell(8, 1, 0)]), "4 ranks: 2 cells, [1 of 3 done]"],
];
for (const [name, state, wanted] of statuses) {
  test(`status of ${name}`, () => assert.equal(words.status(state), wanted));
}

test("the button that stops speaks of GPUs where there are any", () => {
  assert.match(words.stopCaption(true), /free their GPUs/);
  assert.doesNotMatch(words.stopCaption(false), /GPU/);
});
