/**
 * The lines of a cell's output by rank: "[0-2] text" is a line of ranks 0, 1 and 2. Text in, text out; knows no page.
 */

const LABEL = /^\[([0-9,-]+)\](?: \([^)]*\))? /;
const COLORS = new RegExp(`${String.fromCharCode(27)}\\[[0-9;]*[A-Za-z]`, "g");

/** A line and the label that it begins with, "0-2"; "": a line of no rank. */
export type Line = [label: string, text: string];

/** Take a text apart. */
export function linesOf(text: string): Line[] {
  const lines = text.split("\n");
  if (lines.at(-1) === "") lines.pop();
  return lines.map(lineOf);
}

/** The ranks that a label names: "0,2-3". */
export function ranksOf(label: string): number[] {
  return label.split(",").flatMap((span) => {
    const [first, last] = span.split("-").map(Number);
    if (first === undefined || span === "") return [];
    return Array.from({ length: Math.max(0, (last ?? first) - first) + 1 }, (_, index) => first + index);
  });
}

function lineOf(text: string): Line {
  const settled = text.replace(/\r+$/, "");
  const shown = settled.slice(settled.lastIndexOf("\r") + 1).replace(COLORS, ""); // what a terminal would show
  const match = LABEL.exec(shown);
  return match === null ? ["", shown] : [match[1] ?? "", shown.slice(match[0].length)];
}
