/**
 * A line with a terminal's colors as elements, in the classes that JupyterLab's look has for them.
 */

const ESCAPE = String.fromCharCode(27);
const CODES = new RegExp(`${ESCAPE}\\[([0-9;?]*)([A-Za-z])`);
const NAMES = ["black", "red", "green", "yellow", "blue", "magenta", "cyan", "white"] as const;

/** The line's text, and elements where it is colored. */
export function colored(line: string): (string | HTMLElement)[] {
  if (!line.includes(ESCAPE)) return [line];
  const pieces = line.split(CODES); // text, codes, kind, text, ...
  const found: (string | HTMLElement)[] = [];
  let classes = new Set<string>();
  for (let index = 0; index < pieces.length; index += 3) {
    if (index > 0 && pieces[index - 1] === "m") classes = after(classes, pieces[index - 2] ?? "");
    const text = pieces[index] ?? "";
    if (text !== "") found.push(classes.size === 0 ? text : span(text, classes));
  }
  return found;
}

/** The classes that hold from these codes on: "1;31". */
function after(classes: Set<string>, codes: string): Set<string> {
  let next = new Set(classes);
  const put = (kind: "fg" | "bg", name: string | undefined): void => {
    for (const each of next) if (each.endsWith(kind)) next.delete(each);
    if (name !== undefined) next.add(`ansi-${name}-${kind}`);
  };
  for (const code of codes.split(";").map(Number)) {
    if (code === 0) next = new Set();
    else if (code === 1) next.add("ansi-bold");
    else if (code === 4) next.add("ansi-underline");
    else if (code === 22) next.delete("ansi-bold");
    else if (code === 24) next.delete("ansi-underline");
    else if (code === 38 || code === 48) break; // of 256 colors or more: JupyterLab has no classes for them
    else if ((code >= 30 && code <= 37) || code === 39) put("fg", NAMES[code - 30]);
    else if ((code >= 40 && code <= 47) || code === 49) put("bg", NAMES[code - 40]);
    else if (code >= 90 && code <= 97) put("fg", `${NAMES[code - 90] ?? ""}-intense`);
  }
  return next;
}

function span(text: string, classes: Set<string>): HTMLElement {
  const element = document.createElement("span");
  element.className = [...classes].join(" ");
  element.textContent = text;
  return element;
}
