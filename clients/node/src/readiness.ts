import { create } from "@bufbuild/protobuf";
import { anyPack } from "@bufbuild/protobuf/wkt";

import { IcehouseError } from "./errors.js";
import { ErrorInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { type Server, ServerState } from "./gen/icehouse/v1/server_service_pb.js";
import { sleep } from "./sleep.js";
import { DEADLINE_EXCEEDED, INTERNAL, UNAVAILABLE } from "./status.js";

const FIRST_DELAY_MS = 100;
const LAST_DELAY_MS = 1_000;

/**
 * Calls `ask`, with the time that is left, until it returns a server that is ready. Throws DEADLINE_EXCEEDED when time
 * is up, and other errors that waiting does not cure at once.
 */
export async function readyServer(
  ask: (leftMs: number) => Promise<Server>,
  timeoutMs: number,
  signal: AbortSignal | undefined,
): Promise<Server> {
  const end = Date.now() + timeoutMs;
  let last = "it has not answered";
  for (let delayMs = FIRST_DELAY_MS; ; delayMs = Math.min(2 * delayMs, LAST_DELAY_MS)) {
    try {
      const server = await ask(Math.max(0, end - Date.now()));
      if (server.state === ServerState.READY) return server;
      if (server.state === ServerState.FAILED) throw engineFailed();
      last = `it is ${ServerState[server.state]}`;
    } catch (error) {
      if (!(error instanceof IcehouseError)) throw error;
      if (error.code === DEADLINE_EXCEEDED) throw late(last);
      if (error.code !== UNAVAILABLE) throw error;
      last = error.message;
    }
    const leftMs = end - Date.now();
    if (leftMs <= 0) throw late(last);
    // If the signal ended the sleep, the next call throws.
    await sleep(Math.min(delayMs, leftMs), signal);
  }
}

function late(last: string): IcehouseError {
  const message = `the server was not ready in time: ${last}`;
  return new IcehouseError({ code: DEADLINE_EXCEEDED, message, details: [], cause: undefined });
}

function engineFailed(): IcehouseError {
  const message = "the server's engine has failed; start it again";
  const details = [anyPack(ErrorInfoSchema, create(ErrorInfoSchema, { reason: "ENGINE_FAILED" }))];
  return new IcehouseError({ code: INTERNAL, message, details, cause: undefined });
}
