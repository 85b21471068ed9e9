/** Returns after a delay, or at once when the signal ends it; browsers have no timers that promise. */
export async function sleep(delayMs: number, signal: AbortSignal | undefined): Promise<void> {
  await new Promise<void>((resolve) => {
    const end = () => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, delayMs);
    if (signal?.aborted) end();
    else signal?.addEventListener("abort", end, { once: true });
  });
}
