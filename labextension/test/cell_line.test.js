// The line that says where a cell runs, as the picker and the badges read and write it.

import assert from "node:assert/strict";
import { test } from "node:test";

import { ALL, change, KERNEL, keptByLine, namesRanks, placeOf, withPlace } from "../../build/front_end/cell_line.mjs";

const ranks = (text) => ({ kind: "ranks", ranks: text });
const AUTO = true; // `%distributed auto on`

const places = [
  ["x = 1", KERNEL],
  ["", KERNEL],
  ["# %%distributed", KERNEL],
  ["%%distributed\nx = 1", ALL],
  ["%%dist --timeout 60\nx = 1", ALL],
  ["%%distributed -r all\nx = 1", ALL],
  ["%%distributed_data\nx = 1", KERNEL],
  ["\n%%distributed -r 0,2-3 --quiet\nx = 1", ranks("0,2-3")],
  ["  %%distributed -r 1\n  x = 1", ranks("1")],
  ["%%distributed --ranks=@node-b\nx = 1", ranks("@node-b")],
  ["%%distributed --ranks '0, 2'\nx = 1", ranks("0,2")],
  ["%%dist -r1\nx = 1", ranks("1")],
  ["%%dist -r=1\nx = 1", ranks("1")],
  ["%%dist -qr 1\nx = 1", ranks("1")],
  ["%%dist -br1\nx = 1", ranks("1")],
  ["%%distributed # only -r 1\nx = 1", ALL],
  ["%%distributed -r 0 # not -r 1\nx = 1", ranks("0")],
  ["%%rank 0 --quiet\nx = 1", ranks("0")],
  ["%%rank 0, 2\nx = 1", ranks("0,2")],
  ["%%rank 0, 2 --quiet # both\nx = 1", ranks("0,2")],
  ["%%rank all\nx = 1", ALL],
  ["%%memory\n%%distributed -r 1\nx = 1", ranks("1")],
  ["%%time\n%%distributed -r 1\nx = 1", ranks("1")],
  ["%%capture kept\n\n%%distributed\nx = 1", ALL],
  ["# train\n%%distributed\nx = 1", ALL],
  ["# train\n\n# all\n%%rank 1\nx = 1", ranks("1")],
  ["# train\n%%memory\n# all\n%%distributed\nx = 1", ALL],
  ["%%time\n# train\n%%distributed\nx = 1", ALL],
  ["# train\nx = 1\n%%distributed", KERNEL],
  ["# train\n%%bash\n%%distributed", KERNEL],
  ["%%writefile a.py\n%%distributed\nx = 1", KERNEL],
  ["%%local\n%%distributed -r 1\nx = 1", ranks("1")],
  ["%distributed start -n 2", KERNEL],
];
for (const [source, place] of places) {
  test(`place of ${JSON.stringify(source)}`, () => assert.deepEqual(placeOf(source), place));
}

const moves = [
  ["x = 1", ALL, "%%distributed\nx = 1"],
  ["x = 1", ranks("0,2"), "%%distributed -r 0,2\nx = 1"],
  ["", ALL, "%%distributed\n"],
  ["%%distributed\nx = 1", KERNEL, "x = 1"],
  ["%%distributed -r 0 --timeout 60\nx = 1", ALL, "%%distributed --timeout 60\nx = 1"],
  ["%%dist -qr 1 --capture out\nx = 1", ranks("0"), "%%distributed -r 0 -q --capture out\nx = 1"],
  ["%%dist -r1 --profile 'a trace.json'\nx = 1", ALL, "%%distributed --profile 'a trace.json'\nx = 1"],
  ["%%distributed # only -r 1\nx = 1", ranks("0"), "%%distributed -r 0 # only -r 1\nx = 1"],
  ["  %%distributed -r 1\n  x = 1", ALL, "  %%distributed\n  x = 1"],
  ["%%rank 0 --quiet\nx = 1", ranks("1"), "%%distributed -r 1 --quiet\nx = 1"],
  ["%%rank 0, 2\nx = 1", ranks("1"), "%%distributed -r 1\nx = 1"],
  ["%%rank 0, 2\nx = 1", KERNEL, "x = 1"],
  ["%%memory\nx = 1", ALL, "%%memory\n%%distributed\nx = 1"],
  ["%%memory", ALL, "%%memory\n%%distributed"],
  ["# train\nx = 1", ALL, "%%distributed\n# train\nx = 1"],
  ["# train\n%%distributed\nx = 1", ranks("1"), "# train\n%%distributed -r 1\nx = 1"],
  ["# train\n%%distributed\nx = 1", KERNEL, "# train\nx = 1"],
  ["# train\n%%memory\nx = 1", ALL, "# train\n%%memory\n%%distributed\nx = 1"],
  ["%%memory\n# train\nx = 1", ALL, "%%memory\n%%distributed\n# train\nx = 1"],
  ["# train\n%%local\nx = 1", ALL, "# train\n%%distributed\nx = 1"],
  ["%%time\n%%distributed -r 1\nx = 1", ALL, "%%time\n%%distributed\nx = 1"],
  ["%%time\n%%distributed\nx = 1", KERNEL, "%%time\nx = 1"],
  ["%%time\nx = 1", ALL, "%%distributed\n%%time\nx = 1"],
  ["%%writefile a.py\n%%memory\nx = 1", ALL, "%%distributed\n%%writefile a.py\n%%memory\nx = 1"],
  ["%%local\nx = 1", ranks("1"), "%%distributed -r 1\nx = 1"],
  ["%%memory\n%%local\nx = 1", ALL, "%%memory\n%%distributed\nx = 1"],
  ["%%local\n%%distributed -r 1 -q\nx = 1", ALL, "%%distributed -q\nx = 1"],
  ["%%local\nx = 1", KERNEL, "%%local\nx = 1"],
  ["x = 1", KERNEL, "x = 1"],
];
for (const [source, place, next] of moves) {
  test(`${JSON.stringify(source)} on ${JSON.stringify(place)}`, () => assert.equal(withPlace(source, place), next));
}

const autoPlaces = [
  ["x = 1", ALL],
  ["", ALL],
  ["%%bash\nls", ALL],
  ["%%distributed -r 1\nx = 1", ranks("1")],
  ["%%local\nx = 1", KERNEL],
  ["%%memory\n%%local\nx = 1", KERNEL],
  ["# here\n%%local\nx = 1", KERNEL],
  ["# magics of the notebook stay there\n%distributed status", KERNEL],
  ["%%memory\n%pip list", KERNEL],
  ["%load_ext nbdist", KERNEL],
  ["%load_ext other", ALL],
  ["%%time\nx = 1", ALL],
  ["%%time\n%%distributed -r 1\nx = 1", ranks("1")],
  ["%%time\n%%local\nx = 1", KERNEL],
  ["%%capture kept\n%pip list", KERNEL],
];
for (const [source, place] of autoPlaces) {
  test(`with auto on: place of ${JSON.stringify(source)}`, () => assert.deepEqual(placeOf(source, AUTO), place));
}

const autoMoves = [
  ["x = 1", KERNEL, "%%local\nx = 1"],
  ["%%memory\nx = 1", KERNEL, "%%memory\n%%local\nx = 1"],
  ["%%distributed -r 1\nx = 1", KERNEL, "%%local\nx = 1"],
  ["%%distributed\n%pip list", KERNEL, "%pip list"],
  ["%%time\n%%distributed\nx = 1", KERNEL, "%%local\n%%time\nx = 1"],
  ["x = 1", ranks("1"), "%%distributed -r 1\nx = 1"],
  ["%%local\nx = 1", ALL, "x = 1"],
  ["%%local\nx = 1", ranks("1"), "%%distributed -r 1\nx = 1"],
  ["%%distributed -r 1 -q\nx = 1", ALL, "%%distributed -q\nx = 1"],
  ["x = 1", ALL, "x = 1"],
  ["%%time\n%%distributed -r 1\nx = 1", ranks("0"), "%%time\n%%distributed -r 0\nx = 1"],
];
for (const [source, place, next] of autoMoves) {
  test(`with auto on: ${JSON.stringify(source)} on ${JSON.stringify(place)}`, () =>
    assert.equal(withPlace(source, place, AUTO), next));
}

const kept = [
  ["x = 1", null],
  ["%%time\nx = 1", null],
  ["%%writefile a.txt\n%distributed status", null],
  ["%%distributed -r 1\nx = 1", null],
  ["%%time\n%distributed status", "%distributed status"],
  ["%%time\n%%bash\n%distributed status", null],
  ["%distributed plan ddp", "%distributed plan ddp"],
  ["%%local\nx = 1\n%dist status", "%dist status"],
  ["%load_ext nbdist\nx = 1", "%load_ext nbdist"],
  ["%pip install x", "%pip install x"],
  ["# a comment\n%%distributed\nx = 1", null],
];
for (const [source, line] of kept) {
  test(`line that keeps ${JSON.stringify(source)} from ranks`, () => assert.equal(keptByLine(source), line));
}

test("ranks are named as -r takes them", () => {
  const good = ["0", "0,2-3", "@node-b", "0,@node-b.local", "all"];
  const bad = ["0;1", "0 1", "", "--quiet", "-1", "0-3-5", "0,", "node", "0,all"];
  assert.deepEqual(good.filter(namesRanks), good);
  assert.deepEqual(bad.filter(namesRanks), []);
});

// What stands before and after a change stays, and with it the cursor in an editor.
const changes = [
  ["x = 1", "%%distributed\nx = 1", { start: 0, end: 0, value: "%%distributed\n" }],
  ["%%distributed\nx = 1", "x = 1", { start: 0, end: 14, value: "" }],
  ["%time x", "%%distributed\n%time x", { start: 0, end: 0, value: "%%distributed\n" }],
  ["%%dist -r 1 -q\nx", "%%dist -r 0 -q\nx", { start: 10, end: 11, value: "0" }],
  ["%%local\nx", "%%distributed\nx", { start: 2, end: 7, value: "distributed" }],
  ["", "%%distributed\n", { start: 0, end: 0, value: "%%distributed\n" }],
];
for (const [source, next, wanted] of changes) {
  test(`change from ${JSON.stringify(source)} to ${JSON.stringify(next)}`, () =>
    assert.deepEqual(change(source, next), wanted));
}
