import { IcehouseError } from "./errors.js";
import { sleep } from "./sleep.js";
import { RESOURCE_EXHAUSTED } from "./status.js";

/** A delay is made longer by up to this share, so that those who were refused together come one by one. */
const SPREAD = 0.25;

/** What bounds the attempts of one call. */
export interface AttemptBounds {
  /** How often it is sent again at most. */
  readonly limit: number;
  /** In milliseconds since 1970; nothing is sent after it. */
  readonly deadline: number;
  readonly signal: AbortSignal | undefined;
}

/**
 * Returns what `attempt` returns, which is called again where the server refuses it for now and says when to come
 * back: RESOURCE_EXHAUSTED with a RetryInfo, of which nothing has run.
 */
export async function sentAgain<T>(attempt: () => Promise<T>, { limit, deadline, signal }: AttemptBounds): Promise<T> {
  for (let left = limit; ; left--) {
    try {
      return await attempt();
    } catch (error) {
      const delayMs = left > 0 ? delayAfter(error) : undefined;
      if (delayMs === undefined || delayMs >= deadline - Date.now()) throw error;
      // Of a signal the next attempt says what all calls say of it.
      await sleep(delayMs, signal);
    }
  }
}

/** Returns how long to wait before a refused call is sent again; undefined where that makes no sense. */
function delayAfter(error: unknown): number | undefined {
  if (!(error instanceof IcehouseError) || error.code !== RESOURCE_EXHAUSTED) return undefined;
  return error.retryAfterMs && error.retryAfterMs * (1 + SPREAD * Math.random());
}
