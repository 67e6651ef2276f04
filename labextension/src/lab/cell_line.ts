/**
 * The line of a cell that says where it runs: `%%distributed -r 0,2-3`. Text in, text out; knows no notebook.
 */

/** Where a cell runs: in the kernel, or on ranks; "": all of them. */
export type Place = { kind: "kernel" } | { kind: "ranks"; ranks: string };

export const KERNEL: Place = { kind: "kernel" };
export const ALL: Place = { kind: "ranks", ranks: "" };

const ABOVE = /^\s*(%%(memory|local)\b.*)?$/; // lines that may stand above ours: empty ones and %%memory
const OURS = /^%%(distributed|dist)\b(.*)$/;
const RANK = /^%%rank\s+(\S+)(.*)$/;
const FLAG = /(^|\s)(-r|--ranks)(?:\s+|=)("[^"]*"|'[^']*'|\S+)/;
const RANKS = /^(@?[\w.-]+|\d+(-\d+)?)(,(@?[\w.-]+|\d+(-\d+)?))*$/;

/** Where a cell with this source runs. */
export function placeOf(source: string): Place {
  const [, line] = find(source);
  const ours = OURS.exec(line);
  if (ours !== null) return { kind: "ranks", ranks: unquoted(FLAG.exec(ours[2] ?? "")?.[3] ?? "") };
  const rank = RANK.exec(line);
  return rank === null ? KERNEL : { kind: "ranks", ranks: unquoted(rank[1] ?? "") };
}

/** The source with another place; other flags of its line stay. */
export function withPlace(source: string, place: Place): string {
  const lines = source.split("\n");
  const [index, line] = find(source);
  const flags = flagsOf(line);
  if (place.kind === "kernel") {
    if (flags !== null) lines.splice(index, 1);
    return lines.join("\n");
  }
  const next = `%%distributed${place.ranks === "" ? "" : ` -r ${place.ranks}`}${flags === null || flags === "" ? "" : ` ${flags}`}`;
  lines.splice(index, flags === null ? 0 : 1, next);
  return lines.join("\n");
}

/** Whether this names ranks as `-r` takes them: "0,2-3", "@node-b". */
export function namesRanks(text: string): boolean {
  return RANKS.test(text);
}

/** Whether a notebook with such a cell uses nbdist. */
export function usesRanks(source: string): boolean {
  return /\bnbdist\b|^\s*%%?(distributed|dist|rank)\b/m.test(source);
}

/** The line that says where the cell runs, or before which it would stand. */
function find(source: string): [index: number, line: string] {
  const lines = source.split("\n");
  const index = lines.findIndex((line) => !ABOVE.test(line));
  if (index >= 0 && (OURS.test(lines[index] ?? "") || RANK.test(lines[index] ?? ""))) return [index, lines[index] ?? ""];
  const memory = lines.findIndex((line) => line.startsWith("%%memory"));
  return [memory + 1, ""];
}

/** What the line says besides the ranks; null: it is none of ours. */
function flagsOf(line: string): string | null {
  const ours = OURS.exec(line);
  if (ours !== null) return (ours[2] ?? "").replace(FLAG, "").trim();
  return RANK.exec(line)?.[2]?.trim() ?? null;
}

function unquoted(text: string): string {
  return text.replace(/^(["'])(.*)\1$/, "$2");
}
