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
import { refuseUnknownOptions } from "./options.js";

/** The deadline of a call that names none. */
export const DEFAULT_TIMEOUT_MS = 120_000;

/** The deadline of Warm, Evict and Verify that name none: a long prompt or a large disk takes its time. */
export const DEFAULT_ORDER_TIMEOUT_MS = 3_600_000;

const ORDERS: ReadonlySet<DescMethod> = new Set([
  CacheService.method.warm,
  CacheService.method.evict,
  CacheService.method.verify,
]);

export interface CallOptions {
  /** When the call ends with DEADLINE_EXCEEDED. Absent: the client's. */
  readonly timeoutMs?: number | undefined;
  /** Ends the call with CANCELLED, on the server too. */
  readonly signal?: AbortSignal | undefined;
}

/** Calls of one connection, each with its deadline and, where it has a prompt, its prefix key. */
export class Calls {
  readonly #connection: Connection;
  /** The deadline of calls that name none. */
  readonly timeoutMs: number;
  readonly #orderTimeoutMs: number;

  constructor(connection: Connection, timeoutMs: number, orderTimeoutMs: number) {
    this.#connection = connection;
    this.timeoutMs = timeoutMs;
    this.#orderTimeoutMs = timeoutMs === Infinity ? Infinity : orderTimeoutMs;
  }

  /** Sends one request and returns its answer. */
  async unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageShape<I>,
    options: CallOptions,
  ): Promise<MessageShape<O>> {
    const deadline = deadlineOf(options, ORDERS.has(method) ? this.#orderTimeoutMs : this.timeoutMs);
    return this.#connection.unary(method, request, keyOf(request), { deadline }, options.signal);
  }

  /** Sends one request and yields its answers, without a deadline unless `options` name one. */
  serverStream<I extends DescMessage, O extends DescMessage>(
    method: DescMethodServerStreaming<I, O>,
    request: MessageShape<I>,
    options: CallOptions,
  ): AsyncGenerator<MessageShape<O>, void, undefined> {
    const deadline = deadlineOf(options, Infinity);
    return this.#connection.serverStream(method, request, keyOf(request), { deadline }, options.signal);
  }
}

function deadlineOf(options: CallOptions, fallbackMs: number): number {
  refuseUnknownOptions(options, ["timeoutMs", "signal"]);
  return Date.now() + (options.timeoutMs ?? fallbackMs);
}

function keyOf(request: Message): Readonly<Record<string, string>> {
  const key = prefixKey(request);
  return key ? { [PREFIX_KEY_HEADER]: key } : {};
}
