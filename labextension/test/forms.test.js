// What the forms of the sidebar write into the notebook, and which of a plan's settings they show.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { captionOf, editsOf, isOfNoUse } from "../../build/front_end/plan_form.mjs";
import { fits, sourceOf } from "../../build/front_end/start_form.mjs";

const SETTINGS = JSON.parse(readFileSync(new URL("../src/lab/start_fields.json", import.meta.url), "utf8"));
const [COUNT, ...OTHERS] = SETTINGS;
const NOTHING = { plan: "", precision: "fp32", loaded: true, cpu: false };

const starts = [
  ["nothing that is filled in leaves all to the kernel", [[COUNT, ""]], {}, "%distributed start"],
  ["without GPUs there are two ranks", [[COUNT, ""]], { cpu: true }, "%distributed start -n 2"],
  ["a number of ranks is written as it is typed", [[COUNT, " 4 "]], { cpu: true }, "%distributed start -n 4"],
  ["each setting has its flag", [[COUNT, "4"], [OTHERS[0], "0"]], {}, `%distributed start -n 4 ${OTHERS[0].flag} 0`],
  ["a kernel without nbdist loads it before", [], { loaded: false }, "%load_ext nbdist\n%distributed start"],
  ["a plan comes after the start", [], { plan: "fsdp" }, "%distributed start\n%distributed plan fsdp"],
  ["a precision belongs to the plan", [], { plan: "fsdp", precision: "bf16" }, "%distributed start\n%distributed plan fsdp --precision bf16"],
  ["a precision without a plan is not written", [], { precision: "bf16" }, "%distributed start"],
];
for (const [name, fields, wanted, source] of starts) {
  test(name, () => assert.equal(sourceOf(fields, { ...NOTHING, ...wanted }), source));
}

for (const [text, right] of [["", true], ["2", true], ["1024", true], ["1025", false], ["0", false], ["two", false]]) {
  test(`${JSON.stringify(text)} is ${right ? "" : "no "}number of ranks`, () => assert.equal(fits(COUNT, text), right));
}

const setting = { name: "replicas", group: "", help: "copies", words: [], value: "2", default: "1", owners: ["hsdp"], why: "ddp has one" };

test("only what the reader has changed is sent", () => {
  assert.deepEqual(editsOf([[setting, " 2 "], [{ ...setting, name: "seed" }, " 7 "]]), { seed: "7" });
});

test("a setting that is emptied has changed", () => assert.deepEqual(editsOf([[setting, ""]]), { replicas: "" }));

const uses = [
  ["a setting of the strategy is shown", "1", "hsdp", false],
  ["a setting of another strategy is not shown", "1", "ddp", true],
  ["a setting of another strategy that is set is shown", "2", "ddp", false],
];
for (const [name, text, strategy, hidden] of uses) {
  test(name, () => assert.equal(isOfNoUse(setting, text, strategy), hidden));
}

test("a setting that the strategy has no use for says why", () => {
  assert.equal(captionOf(setting, "ddp"), "copies; ddp has one");
  assert.equal(captionOf(setting, "hsdp"), "copies");
});
