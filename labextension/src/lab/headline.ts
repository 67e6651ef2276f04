/**
 * The sidebar's first line: how the notebook's session is, or why that is not known.
 */

import type { Link } from "./link";
import { ASKING, CUT, CUT_IDLE, NO_KERNEL, NO_NOTEBOOK, NOT_LOADED, NOT_USED, summary } from "./strings";

/** What of a link the line depends on. */
export type Known = Pick<Link, "trouble" | "kernelGone" | "cut" | "state" | "asking" | "used">;

/** @param link - The notebook's; null: there is none in front. */
export function headline(link: Known | null): string {
  if (link === null) return NO_NOTEBOOK;
  if (link.trouble !== "") return link.trouble;
  if (link.kernelGone) return NO_KERNEL;
  if (link.cut) return (link.state?.ranks ?? 0) > 0 ? CUT : CUT_IDLE;
  if (link.state !== null) return summary(link.state);
  if (link.asking) return ASKING;
  return link.used ? NOT_LOADED : NOT_USED;
}
