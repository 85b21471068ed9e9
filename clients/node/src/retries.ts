import { IcehouseError } from "./errors.js";
import { sleep } from "./sleep.js";
import { RESOURCE_EXHAUSTED } from "./status.js";

/** A delay is extended by up to this share, so that callers who were refused together do not return together. */
const SPREAD = 0.25;

/** What bounds the attempts of one call. */
export interface AttemptBounds {
  /** Maximum number of retries. */
  readonly limit: number;
  /** Nothing is sent after it. In milliseconds since 1970; Infinity for none. */
  readonly deadline: number;
  readonly signal: AbortSignal | undefined;
}

/**
 * Returns what `attempt` returns. Calls it again if the server refuses it for now and says when to try again:
 * RESOURCE_EXHAUSTED with a RetryInfo, which means that nothing has run.
 */
export async function sentAgain<T>(attempt: () => Promise<T>, { limit, deadline, signal }: AttemptBounds): Promise<T> {
  for (let left = limit; ; left--) {
    try {
      return await attempt();
    } catch (error) {
      const delayMs = left > 0 ? delayAfter(error) : undefined;
      if (delayMs === undefined || delayMs >= deadline - Date.now()) throw error;
      // If the signal ended the sleep, the next attempt throws.
      await sleep(delayMs, signal);
    }
  }
}

/** Returns the time to wait before a refused call is sent again; undefined if it should not be. */
function delayAfter(error: unknown): number | undefined {
  if (!(error instanceof IcehouseError) || error.code !== RESOURCE_EXHAUSTED) return undefined;
  return error.retryAfterMs && error.retryAfterMs * (1 + SPREAD * Math.random());
}
