/**
 * Writes the types of what crosses to pages, and its constants.
 *
 * python scripts/page_types.py | node labextension/types.mjs FILE
 */

import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname } from "node:path";

import { compile } from "json-schema-to-typescript";

const [file] = process.argv.slice(2);
const { constants, schema } = JSON.parse(readFileSync(0, "utf8"));

const head = `/**
 * What kernels and Jupyter servers say to pages, and pages to them.
 *
 * Written by \`scripts/check --fix\` from the structs in nbdist/wire/pages: change those.
 */`;
const values = Object.entries(constants).map(([name, value]) => `export const ${name} = ${JSON.stringify(value)};`);
const types = await compile(schema, "Wire", { additionalProperties: false, bannerComment: "", style: { printWidth: 140 } });
mkdirSync(dirname(file), { recursive: true });
writeFileSync(file, `${head}\n\n${values.join("\n")}\n\n${types}`);
