// The sidebar's first line.

import assert from "node:assert/strict";
import { test } from "node:test";

import { session } from "../../build/front_end/fake_kernel.mjs";
import { headline } from "../../build/front_end/headline.mjs";
import * as words from "../../build/front_end/strings.mjs";

const LINK = { trouble: "", kernelGone: false, cut: false, state: null, asking: false, used: true };
const HERE = { ...LINK, state: session() };

const lines = [
  ["no notebook in front", null, words.NO_NOTEBOOK],
  ["a kernel of another version", { ...HERE, trouble: "another version" }, "another version"],
  ["a kernel that has gone", { ...HERE, kernelGone: true, cut: true }, words.NO_KERNEL],
  ["a server that is out of reach while ranks run", { ...HERE, cut: true }, words.CUT],
  ["a server that is out of reach without ranks", { ...HERE, cut: true, state: { ...session(), ranks: 0 } }, words.CUT_IDLE],
  ["a session", HERE, words.summary(session())],
  ["a kernel that has not answered", { ...LINK, asking: true }, words.ASKING],
  ["a kernel without nbdist", LINK, words.NOT_LOADED],
  ["a notebook without cells for ranks", { ...LINK, used: false }, words.NOT_USED],
];
for (const [name, link, line] of lines) {
  test(`the line for ${name}`, () => assert.equal(headline(link), line));
}
