// What a reader sees of a cell's output, by rank.

import assert from "node:assert/strict";
import { test } from "node:test";

import { RankText } from "../../build/front_end/rank_text.mjs";

const PRINTED = { text: "[0-1] begin\n[1] soon\nours\n", ofAll: false };
const TRACE = "[7] \u001b[31mtrace\u001b[0m";
const ERROR = { text: `rank 1 raised ValueError: bad\n${TRACE}`, ofAll: true };

async function rowsOf(choice) {
  const text = new RankText();
  await text.take([PRINTED, ERROR]);
  assert.deepEqual(text.ranks, [0, 1]);
  const rows = await text.find({ rank: null, words: "", differ: false, ...choice });
  return rows.slice(0, rows.length);
}

const BARS = { text: "[0-1] 10 % (10-30 %)   \n[0] 5 %  [1] 7 %\n[1] end\n", ofAll: false };
const OWN = new Map([["[0-1] 10 % (10-30 %)", "30 %"], ["[0] 5 %  [1] 7 %", "7 %"]]);

test("a rank's lines keep their colors", async () => {
  const text = new RankText();
  await text.take([{ text: "[0-1] \u001b[31mred\u001b[0m end\n\u001b[1m[1] bold\u001b[0m\n", ofAll: false }]);
  const rows = await text.find({ rank: 1, words: "", differ: false });
  assert.deepEqual(rows.slice(0, rows.length), ["\u001b[31mred\u001b[0m end", "bold"]);
});

test("a rank's own bars are in the place of those of several", async () => {
  const text = new RankText();
  await text.take([BARS]);
  const rows = async (choice) => {
    const found = await text.find({ rank: 1, words: "", differ: false, ...choice });
    return found.slice(0, found.length);
  };
  assert.deepEqual(await rows({}), ["10 % (10-30 %)   ", "end"]);
  text.takeBars(OWN);
  assert.deepEqual(await rows({}), ["30 %", "7 %", "end"]);
  assert.deepEqual(await rows({ words: "10" }), []);
  assert.deepEqual(await rows({ rank: null, words: "10" }), ["[0-1] 10 % (10-30 %)   "]);
});

test("ranks that are known to have run are there beside those that printed", async () => {
  const text = new RankText();
  await text.take([PRINTED], [0, 1, 2]);
  assert.deepEqual(text.ranks, [0, 1, 2]);
  await text.take([{ text: "[0] begin\n", ofAll: false }], [0, 1, 2]);
  assert.equal(text.several, false);
  await text.take([ERROR], [0, 1, 2]);
  assert.equal(text.several, true);
});

const wanted = [
  ["all ranks have printed lines, ours and the error's", {}, ["[0-1] begin", "[1] soon", "ours", "rank 1 raised ValueError: bad", TRACE]],
  ["a rank has its lines and the error's", { rank: 1 }, ["begin", "soon", "rank 1 raised ValueError: bad", TRACE]],
  ["what is searched may be partly colored", { rank: 0, words: "[7] trace" }, [TRACE]],
  ["an error is found", { rank: 0, words: "valueerror" }, ["rank 1 raised ValueError: bad"]],
  ["an error is not what ranks have printed differently", { differ: true }, ["[1] soon"]],
];
for (const [name, choice, rows] of wanted) test(name, async () => assert.deepEqual(await rowsOf(choice), rows));
