// Which ranks a line of output belongs to.

import assert from "node:assert/strict";
import { test } from "node:test";

import { lineOf, ranksOf, rowsOf, Tally } from "../../build/front_end/rank_lines.mjs";

const lines = [
  ["[0-1] step 1\n[0] loss 2\n", [["0-1", "step 1"], ["0", "loss 2"]]],
  ["[8-15] (node-b) ready\n", [["8-15", "ready"]]],
  ["[0] [1] is not a label\n", [["0", "[1] is not a label"]]],
  ["2 ranks ready\n[0] \n", [["", "2 ranks ready"], ["0", ""]]],
  ["[0]  1%\r[0]  50%\r[0] 100%\r\n", [["0", "100%"]]],
  ["[1] \u001b[31mred\u001b[0m", [["1", "red"]]],
  ["[0-9999999] x\n[70000] y\n", [["", "[0-9999999] x"], ["", "[70000] y"]]],
  ["[5-2] x\n[1,0] y\n[0-3,2] z\n[,] a\n[1-] b\n[-] c\n[0-1-2] d\n", [["", "[5-2] x"], ["", "[1,0] y"], ["", "[0-3,2] z"], ["", "[,] a"], ["", "[1-] b"], ["", "[-] c"], ["", "[0-1-2] d"]]],
  ["", []],
];
for (const [text, found] of lines) {
  test(`lines of ${JSON.stringify(text)}`, () => assert.deepEqual(rowsOf(text).map(lineOf), found));
}

test("a label names ranks", () => assert.deepEqual(ranksOf("0,2-4,7"), [0, 2, 3, 4, 7]));

const none = ["", "70000", "0-9999999", "0-999999999999", "5-2", "1,0", "0-3,2", "0,0", "1-", "-1", ",", "0-1-2"];
for (const label of none) test(`"${label}" names no ranks`, () => assert.deepEqual(ranksOf(label), []));

test("lines differ that not all ranks print equally often", () => {
  const tally = new Tally();
  const text = "[0-1] both\n[0] later\n[1] later\n[0] once\n[0-1] twice\n[1] twice\n[0] again\n[0] again\nours\n";
  for (const row of rowsOf(text)) tally.add(...lineOf(row));
  const work = tally.odd(2);
  let step = work.next();
  while (!step.done) step = work.next();
  assert.deepEqual([...step.value], ["once", "twice", "again"]);
});
