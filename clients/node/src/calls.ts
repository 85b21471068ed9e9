import type {
  DescMessage,
  DescMethod,
  DescMethodServerStreaming,
  DescMethodUnary,
  Message,
  MessageShape,
} from "@bufbuild/protobuf";

import { CacheService } from "./gen/icehouse/v1/cache_service_pb.js";
import { EmbeddingService } from "./gen/icehouse/v1/embedding_service_pb.js";
import { InferenceService } from "./gen/icehouse/v1/inference_service_pb.js";
import { RerankService } from "./gen/icehouse/v1/rerank_service_pb.js";
import { refuseUnknownOptions } from "./options.js";
import { PREFIX_KEY_HEADER } from "./prefix.js";
import { sentAgain } from "./retries.js";
import type { BearerToken } from "./token.js";
import type { CallBounds, Transport } from "./transport.js";

/** The deadline of a call that names none. */
export const DEFAULT_TIMEOUT_MS = 120_000;

/** The deadline of Warm, Evict and Verify that name none: a long prompt or a large disk takes its time. */
export const DEFAULT_ORDER_TIMEOUT_MS = 3_600_000;

const ORDERS: ReadonlySet<DescMethod> = new Set([
  CacheService.method.warm,
  CacheService.method.evict,
  CacheService.method.verify,
]);

/** What is sent again where the server refuses it for now. */
const RETRIED: ReadonlySet<DescMethod> = new Set([
  InferenceService.method.generate,
  EmbeddingService.method.embed,
  RerankService.method.rerank,
]);

export interface CallOptions {
  /** When the call ends with DEADLINE_EXCEEDED. Absent: the client's. */
  readonly timeoutMs?: number | undefined;
  /** Ends the call with CANCELLED, on the server too. */
  readonly signal?: AbortSignal | undefined;
  /** Headers of this call; an "authorization" among them goes in place of the client's token. */
  readonly metadata?: Readonly<Record<string, string>> | undefined;
}

/** What calls have that say nothing else. */
export interface CallDefaults {
  readonly timeoutMs: number;
  readonly orderTimeoutMs: number;
  readonly retryLimit: number;
}

/** Calls of one connection, each with its deadline and, where it has a prompt, its prefix key. */
export class Calls {
  readonly #transport: Transport;
  readonly #token: BearerToken;
  /** The deadline of calls that name none. */
  readonly timeoutMs: number;
  readonly #orderTimeoutMs: number;
  readonly #retryLimit: number;

  constructor(transport: Transport, token: BearerToken, { timeoutMs, orderTimeoutMs, retryLimit }: CallDefaults) {
    if (!Number.isInteger(retryLimit) || retryLimit < 0) {
      throw new RangeError(`retryLimit is ${retryLimit}, and must be a whole number of at least 0`);
    }
    this.#transport = transport;
    this.#token = token;
    this.timeoutMs = timeoutMs;
    this.#orderTimeoutMs = timeoutMs === Infinity ? Infinity : orderTimeoutMs;
    this.#retryLimit = retryLimit;
  }

  /** Sends one request and returns its answer. */
  async unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageShape<I>,
    options: CallOptions,
  ): Promise<MessageShape<O>> {
    const bounds = boundsOf(options, ORDERS.has(method) ? this.#orderTimeoutMs : this.timeoutMs);
    const headers = await this.#headersOf(request, options);
    const attempt = () =>
      this.#token.once(headers, (sent) => this.#transport.unary(method, request, sent, bounds));
    return sentAgain(attempt, { limit: RETRIED.has(method) ? this.#retryLimit : 0, ...bounds });
  }

  /** Sends one request and yields its answers, without a deadline unless `options` name one. */
  serverStream<I extends DescMessage, O extends DescMessage>(
    method: DescMethodServerStreaming<I, O>,
    request: MessageShape<I>,
    options: CallOptions,
  ): AsyncGenerator<MessageShape<O>, void, undefined> {
    return this.#begun(method, request, boundsOf(options, Infinity), options);
  }

  async *#begun<I extends DescMessage, O extends DescMessage>(
    method: DescMethodServerStreaming<I, O>,
    request: MessageShape<I>,
    bounds: CallBounds,
    options: CallOptions,
  ): AsyncGenerator<MessageShape<O>, void, undefined> {
    const headers = await this.#headersOf(request, options);
    yield* this.#token.each(headers, (sent) => this.#transport.serverStream(method, request, sent, bounds));
  }

  /** Ends the connection and what runs on it. */
  close(): void {
    this.#transport.close();
  }

  async #headersOf(request: Message, { metadata }: CallOptions): Promise<Readonly<Record<string, string>>> {
    const key = await this.#transport.prefixKey(request);
    return { ...metadata, ...(key && { [PREFIX_KEY_HEADER]: key }) };
  }
}

function boundsOf(options: CallOptions, fallbackMs: number): CallBounds {
  refuseUnknownOptions(options, ["timeoutMs", "signal", "metadata"]);
  return { deadline: Date.now() + (options.timeoutMs ?? fallbackMs), signal: options.signal };
}
