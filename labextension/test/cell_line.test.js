// The line that says where a cell runs, as the picker and the badges read and write it.

import assert from "node:assert/strict";
import { test } from "node:test";

import { ALL, KERNEL, namesRanks, placeOf, withPlace } from "../../build/front_end/cell_line.mjs";

const ranks = (text) => ({ kind: "ranks", ranks: text });

const places = [
  ["x = 1", KERNEL],
  ["", KERNEL],
  ["# %%distributed", KERNEL],
  ["%%distributed\nx = 1", ALL],
  ["%%dist --timeout 60\nx = 1", ALL],
  ["\n%%distributed -r 0,2-3 --quiet\nx = 1", ranks("0,2-3")],
  ["%%distributed --ranks=@node-b\nx = 1", ranks("@node-b")],
  ["%%rank 0 --quiet\nx = 1", ranks("0")],
  ["%%memory\n%%distributed -r 1\nx = 1", ranks("1")],
  ["%distributed start -n 2", KERNEL],
];
for (const [source, place] of places) {
  test(`place of ${JSON.stringify(source)}`, () => assert.deepEqual(placeOf(source), place));
}

const moves = [
  ["x = 1", ALL, "%%distributed\nx = 1"],
  ["x = 1", ranks("0,2"), "%%distributed -r 0,2\nx = 1"],
  ["%%distributed\nx = 1", KERNEL, "x = 1"],
  ["%%distributed -r 0 --timeout 60\nx = 1", ALL, "%%distributed --timeout 60\nx = 1"],
  ["%%rank 0 --quiet\nx = 1", ranks("1"), "%%distributed -r 1 --quiet\nx = 1"],
  ["%%memory\nx = 1", ALL, "%%memory\n%%distributed\nx = 1"],
  ["x = 1", KERNEL, "x = 1"],
];
for (const [source, place, next] of moves) {
  test(`${JSON.stringify(source)} on ${JSON.stringify(place)}`, () => assert.equal(withPlace(source, place), next));
}

test("ranks are named as -r takes them", () => {
  assert.deepEqual(["0", "0,2-3", "@node-b", "0;1", "0 1", ""].map(namesRanks), [true, true, true, false, false, false]);
});
