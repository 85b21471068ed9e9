import { create, type MessageShape } from "@bufbuild/protobuf";
import { durationFromMs } from "@bufbuild/protobuf/wkt";

import type { CallOptions, Calls } from "./calls.js";
import {
  CacheService,
  type EvictProgress,
  EvictRequestSchema,
  type EvictResponse,
  ExplainRequestSchema,
  type ExplainResponse,
  PinRequestSchema,
  type PinResponse,
  UnpinRequestSchema,
  type UnpinResponse,
  type VerifyProgress,
  VerifyRequestSchema,
  type VerifyResponse,
  WarmRequestSchema,
  type WarmResponse,
} from "./gen/icehouse/v1/cache_service_pb.js";
import type { CacheStatsResponse, PrefillProgress } from "./gen/icehouse/v1/inference_service_pb.js";
import {
  type EvictInit,
  type ExplainInit,
  type PinInit,
  promptedRequestFrom,
  requestFrom,
  type UnpinInit,
  type VerifyInit,
  type WarmInit,
} from "./requests.js";

/** Options of an order that may be long. Without `onProgress` its deadline is the client's `orderTimeoutMs`. */
export interface ProgressOptions<P> extends CallOptions {
  /** Hears how far the order is; what it throws ends the call. With it there is no deadline unless one is named. */
  readonly onProgress?: ((progress: P) => void) | undefined;
}

/** Options of a removal of everything. */
export interface EvictAllOptions extends ProgressOptions<EvictProgress> {
  /** Absent: the served model. */
  readonly model?: string | undefined;
}

/** Options of a watch: how often counters are sent. */
export interface WatchStatsOptions extends CallOptions {
  /** 100 to 3,600,000. Absent: a second. */
  readonly intervalMs?: number | undefined;
}

/** An event of a long order. */
type OrderEvent<P, F> =
  | { readonly case: "progress" | "prefillProgress"; readonly value: P }
  | { readonly case: "finished"; readonly value: F }
  | { readonly case: "started" | undefined; readonly value?: unknown };

/**
 * Looks into the prefix cache and gives it orders: `Client.cache`. Behind a load balancer an order reaches the
 * server that a generate of the same prompt reaches.
 */
export class CacheClient {
  readonly #calls: Calls;

  constructor(calls: Calls) {
    this.#calls = calls;
  }

  /** Returns what generate would reuse of a prompt. */
  async explain(request: ExplainInit, options: CallOptions = {}): Promise<ExplainResponse> {
    return this.#calls.unary(CacheService.method.explain, promptedRequestFrom(ExplainRequestSchema, request), options);
  }

  /** Computes a prompt and keeps it, without generating. */
  async warm(request: WarmInit, options: ProgressOptions<PrefillProgress> = {}): Promise<WarmResponse> {
    const { onProgress, ...rest } = options;
    const message = promptedRequestFrom(WarmRequestSchema, request);
    if (!onProgress) return this.#calls.unary(CacheService.method.warm, message, rest);
    const responses = this.#calls.serverStream(CacheService.method.warmWithProgress, message, rest);
    return finishedOf<PrefillProgress, WarmResponse>(responses, onProgress);
  }

  /** Keeps a prompt's known blocks from being evicted by policy. */
  async pin(request: PinInit, options: CallOptions = {}): Promise<PinResponse> {
    return this.#calls.unary(CacheService.method.pin, promptedRequestFrom(PinRequestSchema, request), options);
  }

  /** Takes a prompt's pins off. */
  async unpin(request: UnpinInit, options: CallOptions = {}): Promise<UnpinResponse> {
    return this.#calls.unary(CacheService.method.unpin, promptedRequestFrom(UnpinRequestSchema, request), options);
  }

  /**
   * Removes a prompt's known blocks, pinned ones too; with `onProgress` piece by piece, and no further once the
   * call ends.
   */
  async evict(request: EvictInit, options: ProgressOptions<EvictProgress> = {}): Promise<EvictResponse> {
    return this.#evict(promptedRequestFrom(EvictRequestSchema, request), options);
  }

  /** Removes every block of the model, for operators; as `evict` otherwise. */
  async evictAll({ model = "", ...options }: EvictAllOptions = {}): Promise<EvictResponse> {
    return this.#evict(create(EvictRequestSchema, { model, target: { case: "all", value: true } }), options);
  }

  /** Has blocks on SSD read and compared, for operators. */
  async verify(request: VerifyInit = {}, options: ProgressOptions<VerifyProgress> = {}): Promise<VerifyResponse> {
    const { onProgress, ...rest } = options;
    const message = requestFrom(VerifyRequestSchema, request);
    if (!onProgress) return this.#calls.unary(CacheService.method.verify, message, rest);
    const responses = this.#calls.serverStream(CacheService.method.verifyWithProgress, message, rest);
    return finishedOf<VerifyProgress, VerifyResponse>(responses, onProgress);
  }

  /** Yields the server's counters at once and then at an interval, until the iteration is left. */
  async *watchStats({ intervalMs, ...options }: WatchStatsOptions = {}): AsyncGenerator<CacheStatsResponse, void, undefined> {
    const { watchStats } = CacheService.method;
    const request = create(watchStats.input, intervalMs === undefined ? {} : { interval: durationFromMs(intervalMs) });
    for await (const { stats } of this.#calls.serverStream(watchStats, request, options)) {
      if (stats) yield stats;
    }
  }

  async #evict(
    message: MessageShape<typeof EvictRequestSchema>,
    { onProgress, ...rest }: ProgressOptions<EvictProgress>,
  ): Promise<EvictResponse> {
    if (!onProgress) return this.#calls.unary(CacheService.method.evict, message, rest);
    const responses = this.#calls.serverStream(CacheService.method.evictWithProgress, message, rest);
    return finishedOf<EvictProgress, EvictResponse>(responses, onProgress);
  }
}

/** Returns what a long order ends with, and tells of the way there. */
async function finishedOf<P, F>(
  responses: AsyncIterable<{ readonly event: OrderEvent<P, F> }>,
  onProgress: (progress: P) => void,
): Promise<F> {
  let finished: F | undefined;
  for await (const { event } of responses) {
    if (event.case === "progress" || event.case === "prefillProgress") onProgress(event.value);
    else if (event.case === "finished") finished = event.value;
  }
  if (finished === undefined) throw new Error("the server ended the call without its result");
  return finished;
}
