// What of a terminal's codes is left in a line.

import assert from "node:assert/strict";
import { test } from "node:test";

import { colored } from "../../build/front_end/colored.mjs";

const ESCAPE = String.fromCharCode(27);

for (const code of ["2K", "1A", "?25l", "?2026h"]) {
  test(`nothing is left of ${code}`, () => assert.deepEqual(colored(`before ${ESCAPE}[${code}after`), ["before ", "after"]));
}
