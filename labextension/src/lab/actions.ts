/**
 * When the sidebar's buttons, and the commands of the same names, can act.
 */

import type { Link } from "./link";
import type { BUTTONS } from "./strings";

/** What a button does to the ranks of a notebook. */
export type Action = keyof typeof BUTTONS;

/** Whether there is something for it to act on. */
export function canAct(link: Link | null, action: Action): boolean {
  const state = link?.state;
  if (state === null || state === undefined || link?.cut === true) return false;
  if (action === "restart") return state.ranks > 0 || state.broken !== ""; // also what broke
  if (state.ranks === 0) return false;
  if (action === "interrupt" || action === "interrupt-now") return state.cells.length > 0;
  return action === "heal" ? state.dead.length > 0 : true;
}
