// What the panel makes of figures before it draws them: parts of memory, what deserves a look, curves, and how live it is.

import assert from "node:assert/strict";
import { test } from "node:test";

import { liveness } from "../../build/front_end/header.mjs";
import { partName, sentence } from "../../build/front_end/row.mjs";
import { held, onGpu, shown, State, urgency } from "../../build/front_end/state.mjs";
import { cells, stretches } from "../../build/front_end/strip.mjs";

const NOTHING = { allocated: null, cache: null, non_torch: null, process: null, others: null, kept: null, peak: null };
const RANK = {
  rank: 0, name: "0", node: 0, device: "cuda:0", gpu: "H100", pid: 1, total: 81920, ...NOTHING, utilization: null,
  temperature: null, power: null, power_limit: null, cpu: null, state: "busy", doing: "", step: null, work: null,
  flops: null, mark: "", mfu: null, badges: [], why: "",
};
const rank = (facts) => ({ ...RANK, ...facts });
const onCpu = (facts) => rank({ device: "cpu", gpu: "", ...facts });

// --- a rank

test("a rank holds what torch has taken, and what is outside of it", () => {
  assert.equal(held(rank({ allocated: 10, cache: 5, non_torch: 2 })), 17);
});

test("a rank whose torch does not say holds what its process does", () => assert.equal(held(rank({ process: 30 })), 30));

test("a GPU's memory is taken by others, too", () => assert.equal(shown(rank({ allocated: 10, others: 4 })), 14));

test("what nobody knows is not shown as nothing", () => assert.equal(shown(RANK), null));

test("on the CPU only what is the rank's own is shown", () => assert.equal(shown(onCpu({ process: 30, others: 4 })), 30));

test("a rank with a cache of torch's is on a GPU whatever that is called", () => assert.equal(onGpu(onCpu({ cache: 0 })), true));

test("the rank that died deserves a look before those that wait for it", () => {
  const badge = (level) => rank({ badges: [[level, "words"]] });
  const ranks = [rank({}), rank({ state: "stuck" }), badge("warn"), badge("bad"), rank({ state: "dead" })];
  assert.deepEqual(ranks.map(urgency), [0, 1, 2, 3, 4]);
});

test("where the driver hides processes, what is not torch's need not be others'", () => {
  assert.notEqual(partName(RANK, "others"), partName(rank({ process: 1 }), "others"));
});

test("a sentence about a rank has only what is known of it", () => {
  assert.equal(sentence(rank({ allocated: 1024 })), "rank 0 on cuda:0, busy, memory 1.0 of 80.0 GiB");
  assert.match(sentence(rank({ temperature: 61, badges: [["warn", "throttled: heat"]] })), /, 61 °C, throttled: heat$/);
});

// --- what the kernel sends

function stateOf(frame) {
  const state = new State();
  const head = { title: "", live: "live", rate: 1, alert: null, stats: [] };
  state.load({
    id: "", columns: ["rank", "name", "state", "doing", "badges", "gpu", "utilization"], node_columns: ["name", "cpu"], heat: false,
    head, ranks: [[0, "0", "busy", "", [], "H100", 10]], nodes: [["here", 5]], levels: {}, history: [[1]], trends: ["step"],
    trend: [[1, 0, 2]], ...frame,
  });
  return state;
}

test("before a frame has come there is nothing to draw", () => assert.equal(new State().known, false));

test("of a row only the columns come that have changed", () => {
  const state = stateOf({});
  state.apply({ type: "update", ranks: [[0, 0b1000010, "zero", 70]] });
  assert.deepEqual([state.ranks[0].name, state.ranks[0].state, state.ranks[0].utilization], ["zero", "busy", 70]);
});

test("a change of a row that there is not is dropped", () => {
  const state = stateOf({});
  state.apply({ type: "update", ranks: [[7, 0b10, "seven"]], nodes: [[3, 0b1, "there"]] });
  assert.deepEqual([state.ranks.length, state.nodes.length], [1, 1]);
});

test("a node's row changes likewise", () => {
  const state = stateOf({});
  state.apply({ type: "update", nodes: [[0, 0b10, 50]] });
  assert.deepEqual(state.nodes, [{ name: "here", cpu: 50 }]);
});

test("the view learns which ranks have changed", () => {
  const state = stateOf({ ranks: [[0, "0", "busy", "", [], "", 1], [1, "1", "busy", "", [], "", 1]] });
  state.apply({ type: "update", ranks: [[1, 0b10, "one"]] });
  assert.deepEqual([...state.touched], [1]);
});

test("each update adds a point to the history of a GPU's rank, and the oldest go", () => {
  const state = stateOf({});
  for (let update = 0; update < 500; update++) state.apply({ type: "update", ranks: [[0, 0b1000000, update]] });
  assert.equal(state.history[0].at(-1), 499);
  assert.ok(state.history[0].length < 500);
});

test("a point of the trend comes after the others", () => {
  const state = stateOf({});
  state.apply({ type: "update", point: [2, 0, 3] });
  assert.deepEqual(state.trend, { names: ["step"], points: [[1, 0, 2], [2, 0, 3]] });
});

test("the dead do not count for the median", () => {
  const state = stateOf({ ranks: [[0, "0", "busy", "", [], "", 1], [1, "1", "dead", "", [], "", 1]], levels: { step: "a/" } });
  assert.equal(state.median("step"), state.level("step", 0));
});

test("a rank of which nothing is known has no level", () => assert.equal(stateOf({ levels: { step: "." } }).level("step", 0), null));

// --- curves

test("a curve breaks where nothing is known, and where nobody looked for long", () => {
  const points = [[0, 0], [1, 0], [2, 0], [3, 0], [60, 0]];
  assert.deepEqual(stretches(points, [5, 6, null, 7, 8]), [[[0, 5], [1, 6]], [[3, 7]], [[60, 8]]]);
});

test("a cell has a band from when it was first seen running to the last time", () => {
  assert.deepEqual(cells([[0, 0], [1, 4], [2, 4], [3, 5], [4, 0], [5, 5]]), [[1, 2], [3, 3], [5, 5]]);
});

// --- how live it is

const HEAD = { title: "", live: "live", rate: 1, alert: null, stats: [] };
const cases = [
  ["live with its updates", HEAD, false, 1, false, "live"],
  ["late after three periods without one", HEAD, false, 3.1, false, "late"],
  ["late no sooner than after three seconds", { ...HEAD, rate: 0.25 }, false, 2, false, "live"],
  ["as slow as the reader wants it", { ...HEAD, rate: 15 }, false, 40, false, "live"],
  ["paused however long ago the last update is", HEAD, true, 1000, false, "paused"],
  ["ended with the session, paused or not", { ...HEAD, live: "ended" }, true, 1000, false, "ended"],
  ["lost with the kernel", { ...HEAD, live: "ended" }, false, 0, true, "lost"],
];
for (const [name, head, paused, silence, lost, found] of cases) {
  test(`the panel is ${name}`, () => assert.equal(liveness(head, paused, silence, lost), found));
}
