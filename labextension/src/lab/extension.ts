/**
 * What JupyterLab loads: its plugins, each with one reason. What they show is loaded when a notebook uses nbdist.
 */

import { modules, type Scope } from "./jupyter";
import { Links } from "./link";
import { ranksPlugin } from "./ranks_plugin";
import { runOnPlugin } from "./run_on_plugin";
import { statusPlugin } from "./status_plugin";

interface Loaded {
  __esModule: true;
  default: unknown;
}

/**
 * Load what JupyterLab asks for: "./extension", our plugins.
 *
 * @param scope - What the page shares.
 */
export async function load(_: string, scope: Scope): Promise<() => Loaded> {
  const lab = await modules(scope);
  const links = new Links(lab);
  const plugins = [ranksPlugin(lab, links), runOnPlugin(lab, links)];
  if (lab.IStatusBar !== null) plugins.push(statusPlugin(lab, links));
  return () => ({ __esModule: true, default: plugins });
}
