// The page writes numbers as Python does: both read tests/unit/figures.json, in the units in which the page gets them.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { milliseconds, partOf, percent, shortName, size, speed } from "../../build/front_end/words.mjs";

const write = {
  size,
  part_of: ([part, whole]) => partOf(part, whole),
  duration: milliseconds,
  flop_rate: speed,
  percent: (value) => percent(value),
};
const cases = JSON.parse(readFileSync(new URL("../../tests/unit/figures.json", import.meta.url), "utf8"));

for (const [kind, table] of Object.entries(cases)) {
  for (const [value, text] of table) {
    test(`${kind} ${JSON.stringify(value)}`, () => assert.equal(write[kind](value), text));
  }
}

test("the name of a rate is short where it stands above its figure", () => {
  assert.equal(shortName("samples per second"), "samples/s");
  assert.equal(shortName("step"), "step");
});
