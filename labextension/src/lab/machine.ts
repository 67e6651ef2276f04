/**
 * What the server tells of its machine: sessions, GPUs, and who holds what. nbdist/server answers.
 */

import { MACHINE_PROTOCOL, type Machine, type NamedSession } from "../generated/wire";
import type { Modules } from "./jupyter";
import { SERVER_WITHOUT_US, SERVER_OTHER, SERVER_SILENT } from "./strings";

/** What the server does with a session. */
export type Act = "interrupt" | "stop";

/** Ask the server. Returns words where it can't answer. */
export async function lookAtMachine(lab: Modules): Promise<Machine | string> {
  const response = await send(lab, "machine", { method: "GET" });
  if (response === null) return SERVER_SILENT;
  if (response.status === 404) return SERVER_WITHOUT_US;
  if (!response.ok) return response.statusText;
  const machine = (await response.json()) as Machine;
  return machine.protocol === MACHINE_PROTOCOL ? machine : SERVER_OTHER;
}

/** Have the server do this. Returns why it did not; empty: it did. */
export async function act(lab: Modules, what: Act, name: string): Promise<string> {
  const response = await send(lab, what, { method: "POST", body: JSON.stringify({ name } satisfies NamedSession) });
  if (response === null) return SERVER_SILENT;
  return response.ok ? "" : response.statusText;
}

/** Null: the server can't be reached. */
async function send(lab: Modules, path: string, init: RequestInit): Promise<Response | null> {
  const { ServerConnection } = lab.services;
  const settings = ServerConnection.makeSettings();
  try {
    return await ServerConnection.makeRequest(`${settings.baseUrl}nbdist/${path}`, init, settings);
  } catch {
    return null;
  }
}
