import type {
  DescMessage,
  DescMethod,
  DescMethodServerStreaming,
  DescMethodUnary,
  Message,
  MessageShape,
} from "@bufbuild/protobuf";

import { PREFIX_KEY_HEADER, prefixKey } from "./affinity.js";
import type { Connection } from "./connection.js";
import { CacheService } from "./gen/icehouse/v1/cache_service_pb.js";
import { EmbeddingService } from "./gen/icehouse/v1/embedding_service_pb.js";
import { InferenceService } from "./gen/icehouse/v1/inference_service_pb.js";
import { RerankService } from "./gen/icehouse/v1/rerank_service_pb.js";
import { refuseUnknownOptions } from "./options.js";
import { sentAgain } from "./retries.js";

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
  readonly #connection: Connection;
  /** The deadline of calls that name none. */
  readonly timeoutMs: number;
  readonly #orderTimeoutMs: number;
  readonly #retryLimit: number;

  constructor(connection: Connection, { timeoutMs, orderTimeoutMs, retryLimit }: CallDefaults) {
    if (!Number.isInteger(retryLimit) || retryLimit < 0) {
      throw new RangeError(`retryLimit is ${retryLimit}, and must be a whole number of at least 0`);
    }
    this.#connection = connection;
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
    const deadline = deadlineOf(options, ORDERS.has(method) ? this.#orderTimeoutMs : this.timeoutMs);
    const attempt = () => this.#connection.unary(method, request, headersOf(request, options), { deadline }, options.signal);
    const limit = RETRIED.has(method) ? this.#retryLimit : 0;
    return sentAgain(attempt, { limit, deadline, signal: options.signal });
  }

  /** Sends one request and yields its answers, without a deadline unless `options` name one. */
  serverStream<I extends DescMessage, O extends DescMessage>(
    method: DescMethodServerStreaming<I, O>,
    request: MessageShape<I>,
    options: CallOptions,
  ): AsyncGenerator<MessageShape<O>, void, undefined> {
    const deadline = deadlineOf(options, Infinity);
    return this.#connection.serverStream(method, request, headersOf(request, options), { deadline }, options.signal);
  }
}

function deadlineOf(options: CallOptions, fallbackMs: number): number {
  refuseUnknownOptions(options, ["timeoutMs", "signal", "metadata"]);
  return Date.now() + (options.timeoutMs ?? fallbackMs);
}

function headersOf(request: Message, { metadata }: CallOptions): Readonly<Record<string, string>> {
  const key = prefixKey(request);
  return { ...metadata, ...(key && { [PREFIX_KEY_HEADER]: key }) };
}
