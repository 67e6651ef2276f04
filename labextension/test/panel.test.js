// What the panel's page makes of the kernel's messages, and how far from the median a rank of a map is.

import assert from "node:assert/strict";
import { test } from "node:test";

import { deviation } from "../../build/front_end/heat.mjs";
import { remarks, State } from "../../build/front_end/state.mjs";

const COLUMNS = ["rank", "name", "state", "doing", "badges"];
const WAITS = "waits in all_reduce, cell 3 line 4, for rank 2";

function stateOf(levels) {
  const state = new State();
  const stats = [["memory", "memory", "1 GiB", "", null, ""], ["step", "step", "1 s", "", null, ""]];
  state.load({
    id: "",
    columns: COLUMNS,
    node_columns: [],
    heat: true,
    head: { title: "", live: "live", rate: 1, alert: null, stats },
    ranks: [...levels].map((_, rank) => [rank, `${rank}`, "busy", "", []]),
    nodes: [],
    levels: { step: levels, state: "b".repeat(levels.length) },
    history: [],
    trends: ["memory"],
    trend: [],
  });
  return state;
}

test("a rank is drawn by how far it is from the median of those that live", () => {
  const state = stateOf("yyy/y");
  assert.equal(deviation(state, "step", 0), 0);
  assert.ok(deviation(state, "step", 3) > 0.9);
  state.apply({ type: "update", levels: [["step", 0, "///"]] });
  assert.equal(deviation(state, "step", 3), 0);
  assert.ok(deviation(state, "step", 4) < -0.9);
});

test("what a rank did is forgotten with its state until the kernel tells what it does", () => {
  const state = stateOf("ab");
  for (const rank of state.ranks) rank.doing = "cell 7 (12 s)";
  state.apply({ type: "update", levels: [["state", 0, "ss"]], ranks: [[1, 0b1000, WAITS]] });
  assert.deepEqual(state.ranks.map((rank) => [rank.state, rank.doing]), [["stuck", ""], ["stuck", WAITS]]);
});

test("of the head only news come", () => {
  const state = stateOf("a");
  state.apply({ type: "update", head: { title: "1 rank", stats: [0, ["step", "step", "2 s", "", null, ""]] } });
  assert.deepEqual([state.head.title, state.head.rate], ["1 rank", 1]);
  assert.deepEqual(state.head.stats.map(([, , value]) => value), ["1 GiB", "2 s"]);
});

test("what all ranks wait in is said once", () => {
  const rank = { state: "stuck", doing: WAITS, badges: [["warn", "throttled: heat"]] };
  assert.deepEqual(remarks(rank, WAITS), [["warn", "throttled: heat"]]);
  assert.deepEqual(remarks(rank), [["warn", WAITS], ["warn", "throttled: heat"]]);
});
