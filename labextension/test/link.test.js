// What a page makes of the messages of its notebook's kernel, and what it tells the kernel.

import assert from "node:assert/strict";
import { afterEach, beforeEach, mock, test } from "node:test";

import { FakeKernel, session } from "../../build/front_end/fake_kernel.mjs";
import { Link } from "../../build/front_end/link.mjs";

globalThis.window = globalThis; // browsers have it, Node does not
let kernel, link;

function open(made) {
  kernel = made;
  link = new Link(kernel.panel, kernel.heartbeat, ["a page that has gone"]);
}

beforeEach(() => {
  mock.timers.enable({ apis: ["setInterval", "setTimeout", "Date"], now: 1000 });
  open(new FakeKernel());
});
afterEach(() => {
  link.leave();
  mock.timers.reset();
});

const CELL = { number: 3, ranks: 2, done: 0, seconds: 1, step: 0 };
const lastCall = () => kernel.calls.at(-1);

test("a notebook with a cell for ranks opens the line, and names the pages that have gone", () => {
  assert.deepEqual(kernel.opening.left, ["a page that has gone"]);
  assert.equal(link.asking, true);
});

test("a notebook without cells for ranks leaves its kernel alone", () => {
  open(new FakeKernel("x = 1"));
  assert.equal(kernel.opening, null);
  assert.equal(link.used, false);
});

test("a notebook with a cell for ranks that was added later opens the line when a cell has ended", () => {
  open(new FakeKernel("x = 1"));
  kernel.source = "%%distributed";
  kernel.endCell();
  assert.notEqual(kernel.opening, null);
});

test("the state that the kernel tells is the page's", () => {
  kernel.say({ type: "state", state: session([CELL]) });
  assert.deepEqual(link.state.cells, [CELL]);
  assert.equal(link.asking, false);
});

test("a page that first hears of ranks at work has come late", () => {
  kernel.say({ type: "state", state: session([CELL]) });
  assert.equal(link.cameLate, true);
});

test("a page that has heard of idle ranks has not come late when a cell begins", () => {
  kernel.say({ type: "state", state: session() });
  kernel.say({ type: "state", state: session([CELL]) });
  assert.equal(link.cameLate, false);
});

test("a kernel of another version is not talked to", () => {
  kernel.greet(-1);
  assert.match(link.trouble, /1\.0/);
  assert.equal(kernel.opening, null);
});

test("answers come to who has asked, in whatever order", async () => {
  const [first, second] = [link.ask({ do: "stacks" }), link.ask({ do: "why" })];
  const ids = kernel.calls.slice(-2).map(({ request }) => request.id);
  kernel.reply(ids[1], { text: "because" });
  kernel.reply(ids[0], { text: "stacks" });
  assert.deepEqual([(await first).text, (await second).text], ["stacks", "because"]);
});

test("an answer brings the state", async () => {
  const asked = link.ask({ do: "stop" });
  kernel.reply(lastCall().request.id, { state: { ...session(), ranks: 0 } });
  await asked;
  assert.equal(link.state.ranks, 0);
});

test("what was asked of a kernel that restarts fails", async () => {
  const asked = link.ask({ do: "stacks" });
  kernel.restart();
  assert.equal((await asked).failed, true);
  assert.equal(link.state, null);
});

test("a kernel that has restarted is asked again when it has run a cell", () => {
  kernel.restart();
  kernel.opening = null;
  kernel.connect();
  assert.equal(kernel.opening, null);
  kernel.endCell();
  assert.notEqual(kernel.opening, null);
});

test("ranks that were replaced from this page count as renewed", async () => {
  const asked = link.ask({ do: "heal" });
  kernel.reply(lastCall().request.id);
  await asked;
  assert.equal(link.renewed, 1);
});

test("the panel's news come while it is followed", () => {
  const heard = [];
  link.follow((news) => heard.push(news.type));
  kernel.say({ type: "update" });
  link.unfollow();
  kernel.say({ type: "update" });
  assert.deepEqual(heard, ["update"]);
  assert.deepEqual(kernel.calls.map(({ wish }) => wish.type), ["opened", "closed"]);
});

test("a cell's last run is known by the cell's id", () => {
  const run = { id: "c", number: 4, ranks: "0-1", failed: "" };
  kernel.say({ type: "cells", cells: [{ ...run, number: 3 }, run] });
  assert.deepEqual(link.ran.get("c"), run);
});

test("bars come to who looks at their rank, and at no other", () => {
  const heard = [];
  const bars = (rank) => ({ type: "bars", id: "c", rank, bars: {}, whole: true });
  link.look("c", 1, (news) => heard.push(news.rank));
  kernel.say(bars(0));
  kernel.say(bars(1));
  link.look("c", null, () => undefined);
  kernel.say(bars(1));
  assert.deepEqual(heard, [1]);
});

test("a kernel that greets again hears what is looked at", () => {
  link.look("c", 1, () => undefined);
  kernel.greet();
  assert.deepEqual(lastCall(), { look: { id: "c", rank: 1 } });
});

test("without its connection what a page shows is old, until the kernel has told the state again", () => {
  kernel.say({ type: "state", state: session() });
  kernel.cut();
  assert.deepEqual([link.closed, link.cut], [true, true]);
  kernel.connect();
  assert.equal(lastCall().request.do, "state");
  assert.equal(link.cut, false);
});

test("the line is opened again where an idle kernel does not answer", () => {
  const before = kernel.opening;
  mock.timers.tick(5000);
  assert.notEqual(kernel.opening, before);
});

test("a page that goes closes its line", () => {
  kernel.close();
  assert.equal(kernel.opening, null);
});

test("who watches is told of each change, until it ends its watch", () => {
  let told = 0;
  const unwatch = link.watch(() => told++);
  kernel.say({ type: "state", state: session() });
  unwatch();
  kernel.say({ type: "state", state: session() });
  assert.equal(told, 1);
});
