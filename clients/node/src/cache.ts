import type { DescMessage, DescMethodServerStreaming, MessageShape } from "@bufbuild/protobuf";

import type { CallOptions, Calls } from "./calls.js";
import {
  CacheService,
  type EvictProgress,
  type EvictResult,
  type ExplainResponse,
  type PinResponse,
  type UnpinResponse,
  type VerifyProgress,
  type VerifyResult,
  type WarmProgress,
  type WarmResult,
} from "./gen/icehouse/v1/cache_service_pb.js";
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

/** Options of a command that may take minutes. Its deadline is the client's `commandTimeoutMs` by default. */
export interface CommandOptions<P> extends CallOptions {
  /** Called each time the server reports progress. If it throws, the command ends with what it threw. */
  readonly onProgress?: ((progress: P) => void) | undefined;
}

/** Options of `evictAll`. */
export interface EvictAllOptions extends CommandOptions<EvictProgress> {
  /** Default: the served model. */
  readonly model?: string | undefined;
}

/** One event of a command. */
type CommandEvent<P, R> =
  | { readonly case: "progress"; readonly value: P }
  | { readonly case: "done"; readonly value: R }
  | { readonly case: undefined };

/**
 * Inspects and manages the server's prefix cache: `client.cache`. Behind a load balancer, a call reaches the server
 * that `generate` with the same prompt reaches.
 */
export class CacheClient {
  readonly #calls: Calls;

  constructor(calls: Calls) {
    this.#calls = calls;
  }

  /** Returns what `generate` would reuse of a prompt. */
  async explain(request: ExplainInit, options: CallOptions = {}): Promise<ExplainResponse> {
    const { explain } = CacheService.method;
    return this.#calls.unary(explain, promptedRequestFrom(explain.input, request), options);
  }

  /** Computes a prompt and keeps it in the cache, without generating. */
  async warm(request: WarmInit, options: CommandOptions<WarmProgress> = {}): Promise<WarmResult> {
    const { warm } = CacheService.method;
    const responses = this.#events(warm, promptedRequestFrom(warm.input, request), options);
    return resultOf<WarmProgress, WarmResult>(responses, options);
  }

  /** Protects the cached blocks of a prompt from eviction by policy. */
  async pin(request: PinInit, options: CallOptions = {}): Promise<PinResponse> {
    const { pin } = CacheService.method;
    return this.#calls.unary(pin, promptedRequestFrom(pin.input, request), options);
  }

  /** Removes the protection of `pin`. */
  async unpin(request: UnpinInit, options: CallOptions = {}): Promise<UnpinResponse> {
    const { unpin } = CacheService.method;
    return this.#calls.unary(unpin, promptedRequestFrom(unpin.input, request), options);
  }

  /** Removes the cached blocks of a prompt, including pinned ones. What was removed before the call ends is gone. */
  async evict(request: EvictInit, options: CommandOptions<EvictProgress> = {}): Promise<EvictResult> {
    const { evict } = CacheService.method;
    const responses = this.#events(evict, promptedRequestFrom(evict.input, request), options);
    return resultOf<EvictProgress, EvictResult>(responses, options);
  }

  /** Removes all blocks of a model, of every tenant. Only for operators. */
  async evictAll({ model = "", ...options }: EvictAllOptions = {}): Promise<EvictResult> {
    const { evictAll } = CacheService.method;
    const responses = this.#events(evictAll, requestFrom(evictAll.input, { model }), options);
    return resultOf<EvictProgress, EvictResult>(responses, options);
  }

  /** Reads blocks on SSD and compares their checksums. Only for operators. */
  async verify(request: VerifyInit = {}, options: CommandOptions<VerifyProgress> = {}): Promise<VerifyResult> {
    const { verify } = CacheService.method;
    const responses = this.#events(verify, requestFrom(verify.input, request), options);
    return resultOf<VerifyProgress, VerifyResult>(responses, options);
  }

  #events<I extends DescMessage, O extends DescMessage>(
    method: DescMethodServerStreaming<I, O>,
    request: MessageShape<I>,
    { onProgress, ...options }: CommandOptions<never>,
  ): AsyncGenerator<MessageShape<O>, void, undefined> {
    const timeoutMs = options.timeoutMs ?? this.#calls.commandTimeoutMs;
    return this.#calls.serverStream(method, request, { ...options, timeoutMs });
  }
}

/** Returns the result, which comes last, and reports the progress before it. */
async function resultOf<P, R>(
  responses: AsyncIterable<{ readonly event: CommandEvent<P, R> }>,
  { onProgress }: CommandOptions<P>,
): Promise<R> {
  let result: R | undefined;
  for await (const { event } of responses) {
    if (event.case === "progress") onProgress?.(event.value);
    else if (event.case === "done") result = event.value;
  }
  if (result === undefined) throw new Error("the server ended the command without a result");
  return result;
}
