/**
 * The line of a cell that says where it runs: `%%distributed -r 0,2-3`. Text in, text out; independent of notebooks.
 *
 * `auto`: whether the kernel runs other cells on all ranks, too (`%distributed auto on`), except below `%%local`.
 */

/** Where a cell runs: in the kernel, or on ranks; "": all of them. */
export type Place = { kind: "kernel" } | { kind: "ranks"; ranks: string };

export const KERNEL: Place = { kind: "kernel" };
export const ALL: Place = { kind: "ranks", ranks: "" };

const BLANK_OR_MARK = /^\s*(%%memory\b.*)?$/; // what may stand above our line also with auto on
const LOCAL = /^\s*%%local\b/;
// As in nbdist/client/magics/router.py: they run the rest as a cell, so that ours may follow.
const AROUND = /^\s*%%(memory|time|timeit|capture|prun)\b/;
const BLANK = /^\s*$/;
const COMMENT = /^\s*#/;
const BELOW_COMMENTS = /^%%(distributed|dist|rank|local|memory)\b/; // the kernel puts them first
const OURS = /^(\s*)%%(?:distributed|dist)(?!\S)(.*)$/;
const RANK = /^(\s*)%%rank\s+(?![-#])(\S.*)$/;
const RANKS_FLAG = /^(?:--ranks(?:=(.+))?|(-[bq]*)r=?(.*))$/; // -r 1, -r1, and with other letters: -qr 1
const WORD = /(?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|\S)+/g;
const QUOTED_OR_COMMENT = /'[^']*'|"(?:\\.|[^"\\])*"|\\.|(?:^|(?<=\s))(#)/g;
const RANKS = /^(all|(@[\w.-]+|\d+(-\d+)?)(,(@[\w.-]+|\d+(-\d+)?))*)$/i;
// As in nbdist/client/magics/router.py: nbdist's magics, and what changes the environment that all ranks share.
const STAYS_HERE = /^\s*%%?(distributed|dist|rank|local|memory|pip|conda|mamba|micromamba|uv|(re)?load_ext\s+nbdist)\b/;

/** What our line says. `flags`: all but the ranks, as they are written. */
interface OurLine {
  indent: string;
  ranks: string;
  flags: string;
}

/** The lines of a cell. `top`: where ours would stand; `at`: where it stands if there is one. */
interface Parts {
  lines: string[];
  top: number;
  local: boolean;
  at: number;
  ours: OurLine | null;
}

/** Where a cell with this source runs. */
export function placeOf(source: string, auto = false): Place {
  const { lines, local, ours } = read(source);
  if (ours !== null) return { kind: "ranks", ranks: ours.ranks };
  if (local) return KERNEL;
  return auto && !STAYS_HERE.test(firstCode(lines)) ? ALL : KERNEL;
}

/** The source with another place; other flags of its line stay. */
export function withPlace(source: string, place: Place, auto = false): string {
  if (place.kind === "kernel" && placeOf(source, auto).kind === "kernel") return source;
  const { lines, top, local, at, ours } = read(source);
  if (ours !== null) lines.splice(at, 1);
  if (local) lines.splice(top, 1);
  const rest = placeOf(lines.join("\n"), auto);
  if (place.kind === "kernel") {
    if (rest.kind !== "kernel") lines.splice(top, 0, "%%local");
  } else if (ours !== null || place.ranks !== "" || rest.kind === "kernel") {
    const words = ["%%distributed", place.ranks === "" ? "" : `-r ${place.ranks}`, ours?.flags ?? ""];
    const line = `${ours?.indent ?? ""}${words.filter((word) => word !== "").join(" ")}`;
    lines.splice(ours === null || local ? top : at, 0, line);
  }
  return lines.join("\n");
}

/** The one replacement that makes a source another. Equal text at the end counts first: a line goes in before one. */
export function change(source: string, next: string): { start: number; end: number; value: string } {
  const shorter = Math.min(source.length, next.length);
  let same = 0; // at the end
  while (same < shorter && source.at(-1 - same) === next.at(-1 - same)) same++;
  let start = 0;
  while (start < shorter - same && source[start] === next[start]) start++;
  return { start, end: source.length - same, value: next.slice(start, next.length - same) };
}

/** The line for which a cell cannot run on ranks; null: it can. */
export function keptByLine(source: string): string | null {
  const { lines, top, local, ours } = read(source);
  if (ours !== null) return null;
  const rest = lines.slice(local ? top + 1 : top);
  const first = firstCode(rest);
  const isText = first.startsWith("%%") && !STAYS_HERE.test(first); // %%bash, %%writefile
  return isText ? null : (rest.find((line) => STAYS_HERE.test(line))?.trim() ?? null);
}

/** Whether this names ranks as `-r` takes them: "0,2-3", "@node-b". */
export function namesRanks(text: string): boolean {
  return RANKS.test(text);
}

/** Whether a notebook with such a cell uses nbdist. */
export function usesRanks(source: string): boolean {
  return /\bnbdist\b|^\s*%%?(distributed|dist|rank)\b/m.test(source);
}

/** Ranks as they are named here: without blanks; "": all. */
export function plainRanks(text: string): string {
  const ranks = text.replace(/["'\s]/g, "");
  return ranks.toLowerCase() === "all" ? "" : ranks;
}

function read(source: string): Parts {
  const lines = source.split("\n");
  const first = firstBelow(lines, 0, BLANK);
  const found = firstBelow(lines, BLANK_OR_MARK.test(lines[first] ?? "") ? first + 1 : 0, BLANK_OR_MARK);
  const top = found >= 0 ? found : lines.findIndex((line) => line.trim() !== "") + 1;
  const local = LOCAL.test(lines[top] ?? "");
  const below = local ? top + 1 : top;
  const at = Math.max(below, firstBelow(lines, below, BLANK, AROUND));
  return { lines, top, local, at, ours: readOurs(lines[at] ?? "") };
}

/** Where the first line stands that none of `above` matches; our magic, if only comments stand between. -1: nowhere. */
function firstBelow(lines: string[], from: number, ...above: RegExp[]): number {
  const isBelow = (line: string, at: number): boolean => at >= from && !above.some((each) => each.test(line));
  const code = lines.findIndex((line, at) => isBelow(line, at) && !COMMENT.test(line));
  return BELOW_COMMENTS.test(lines[code] ?? "") ? code : lines.findIndex(isBelow);
}

function readOurs(line: string): OurLine | null {
  const ours = OURS.exec(line);
  if (ours !== null) return { indent: ours[1] ?? "", ...readFlags(ours[2] ?? "") };
  const rank = RANK.exec(line);
  if (rank === null) return null;
  const [text, comment] = splitComment(rank[2] ?? "");
  const [, ranks = "", flags = ""] = /^(.*?)(\s-\D.*)?$/.exec(text) ?? [];
  return { indent: rank[1] ?? "", ranks: plainRanks(ranks), flags: `${flags} ${comment}`.trim() };
}

function readFlags(line: string): { ranks: string; flags: string } {
  const [text, comment] = splitComment(line);
  let ranks = "";
  const kept: string[] = [];
  const words = text.match(WORD) ?? [];
  while (words.length > 0) {
    const word = words.shift() ?? "";
    const flag = RANKS_FLAG.exec(word);
    if (flag === null) {
      kept.push(word);
      continue;
    }
    if ((flag[2] ?? "-") !== "-") kept.push(flag[2] ?? "");
    ranks = (flag[1] ?? flag[3] ?? "") || (words.shift() ?? "");
  }
  return { ranks: plainRanks(ranks), flags: [...kept, comment].join(" ").trim() };
}

/** A magic's line without the comment at its end, and the comment. */
function splitComment(line: string): [text: string, comment: string] {
  const comment = [...line.matchAll(QUOTED_OR_COMMENT)].find((found) => found[1] !== undefined);
  const end = comment?.index ?? line.length;
  return [line.slice(0, end).trim(), line.slice(end).trim()];
}

/** The first line that is neither blank, nor a comment, nor `%%time` and such. */
function firstCode(lines: string[]): string {
  return lines.find((line) => !/^\s*(#|$)/.test(line) && !AROUND.test(line)) ?? "";
}
