// Lines in view, pages of a log, and which tab of a cell's output shows what.

import assert from "node:assert/strict";
import { test } from "node:test";

import { inView } from "../../build/front_end/line_list.mjs";
import { readPage } from "../../build/front_end/log_pages.mjs";
import * as words from "../../build/front_end/strings.mjs";
import { gapAfter, runShown, tabBeside } from "../../build/front_end/tab_choice.mjs";

// --- lines in view

test("at the top of a list its first lines are held, and some beyond those that are seen", () => {
  assert.deepEqual(inView(1000, 20, 0, 400), { first: 0, count: 61, top: 0 });
});

test("further down some lines above are held too, and drawn where they belong", () => {
  assert.deepEqual(inView(1000, 20, 10_000, 400), { first: 480, count: 61, top: 9600 });
});

test("a list that is too tall for a browser is drawn where the page has scrolled", () => {
  const { count, top } = inView(1_000_000, 20, 4_000_000, 400);
  assert.deepEqual([count, top], [21, 4_000_000]);
});

test("at the end of a list that is too tall its last lines are seen", () => {
  const { first, count } = inView(1_000_000, 20, 8_000_000 - 400, 400);
  assert.equal(first + count, 1_000_001); // the last one that is seen is cut
});

// --- pages of a log

const answer = (text, next) => ({ text: "", failed: false, log: { text, next } });

function kernel(...pages) {
  const asked = [];
  const ask = async (position) => (asked.push(position), pages.shift());
  return [ask, asked];
}

test("a page is read from where it begins", async () => {
  const [ask, asked] = kernel(answer("one\ntwo\n", 80));
  assert.deepEqual(await readPage(ask, 40, false, () => true), { rows: ["one", "two"], next: 80 });
  assert.deepEqual(asked, [40]);
});

test("a search goes on until it has found something", async () => {
  const [ask, asked] = kernel(answer("", 50), answer("", 90), answer("found\n", 120));
  assert.deepEqual(await readPage(ask, 0, true, () => true), { rows: ["found"], next: 120 });
  assert.deepEqual(asked, [0, 50, 90]);
});

test("a search that finds nothing ends with the log", async () => {
  const [ask] = kernel(answer("", 50), answer("", null));
  assert.deepEqual(await readPage(ask, 0, true, () => true), { rows: [], next: null });
});

test("an empty page that nobody searches is shown as it is", async () => {
  const [ask, asked] = kernel(answer("", 50));
  await readPage(ask, 0, false, () => true);
  assert.deepEqual(asked, [0]);
});

test("why there is no log is what is shown", async () => {
  const [ask] = kernel({ text: "the session has ended", failed: true, log: null });
  assert.deepEqual(await readPage(ask, 0, true, () => true), { rows: ["the session has ended"], next: null });
});

test("a page that nobody waits for any more is dropped", async () => {
  const [ask] = kernel(answer("late\n", null));
  assert.equal(await readPage(ask, 0, false, () => false), null);
});

// --- tabs

const run = (number) => ({ id: "c", number, ranks: "0-1", failed: "" });

test("a cell that runs shows its newest run", () => assert.equal(runShown([run(4), run(3)], null).number, 4));

test("a cell that has ended shows the run with its number", () => assert.equal(runShown([run(4), run(3)], 3).number, 3));

test("a run that the kernel no longer knows is still the cell's", () => assert.equal(runShown([null, run(3)], 3).number, 3));

test("saved output has no run", () => assert.equal(runShown([run(4), null], 3), null));

for (const [from, steps, to] of [[null, 1, 0], [0, 1, 2], [2, 1, 2], [0, -1, null], [null, -1, null]]) {
  test(`from the tab ${from ?? "all"} an arrow leads to ${to ?? "all"}`, () => assert.equal(tabBeside([0, 2], from, steps), to));
}

const OPEN = { closed: false, kernelGone: false };
const CLOSED = { closed: true, kernelGone: false };
const GONE = { closed: true, kernelGone: true };
const gaps = [
  ["a connection that holds leaves no gap", "", OPEN, true, true, ""],
  ["a connection that closes while a cell runs leaves one", "", CLOSED, true, true, words.GAP],
  ["a gap stays when the connection is there again", words.GAP, OPEN, true, true, words.GAP],
  ["a kernel that ends ends the gap", words.GAP, GONE, true, true, words.GAP_AT_END],
  ["output that was whole before stays whole", "", CLOSED, false, true, ""],
  ["a cell that has never run misses nothing", "", CLOSED, true, false, ""],
];
for (const [name, gap, link, runs, output, found] of gaps) {
  test(name, () => assert.equal(gapAfter(gap, link, runs, output), found));
}
