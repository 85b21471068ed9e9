import {
  create,
  type DescMessage,
  type DescMethod,
  type DescMethodServerStreaming,
  type DescMethodUnary,
  type Message,
  type MessageInitShape,
  type MessageShape,
} from "@bufbuild/protobuf";

import { PREFIX_KEY_HEADER, prefixKey } from "./affinity.js";
import { Connection } from "./connection.js";
import { CacheService } from "./gen/icehouse/v1/cache_service_pb.js";
import {
  GenerateRequestSchema,
  type GenerateResponse,
  InferenceService,
} from "./gen/icehouse/v1/inference_service_pb.js";
import type { Security } from "./security.js";
import { Stream } from "./stream.js";

/** What generate and stream take: the fields of a GenerateRequest, all but `prompt` optional. */
export type GenerateInit = MessageInitShape<typeof GenerateRequestSchema>;

/** The deadline of a call that names none. */
export const DEFAULT_TIMEOUT_MS = 120_000;

/** The deadline of Warm, Evict and Verify that name none: a long prompt or a large disk takes its time. */
export const DEFAULT_ORDER_TIMEOUT_MS = 3_600_000;

const ORDERS: ReadonlySet<DescMethod> = new Set([
  CacheService.method.warm,
  CacheService.method.evict,
  CacheService.method.verify,
]);

export interface ClientOptions {
  /** Absent: no TLS, no token. */
  readonly security?: Security;
  /** The deadline of calls that name none; Infinity for no deadline. Absent: DEFAULT_TIMEOUT_MS. */
  readonly timeoutMs?: number;
  /** That of Warm, Evict and Verify, unless `timeoutMs` is Infinity. Absent: DEFAULT_ORDER_TIMEOUT_MS. */
  readonly orderTimeoutMs?: number;
}

export interface CallOptions {
  /** When the call ends with DEADLINE_EXCEEDED. Absent: the client's. */
  readonly timeoutMs?: number;
  /** Ends the call with CANCELLED, on the server too. */
  readonly signal?: AbortSignal;
}

/** A connection to one server, or to all that a name resolves to. Every method throws IcehouseError. */
export class Client {
  readonly #connection: Connection;
  readonly #timeoutMs: number;
  readonly #orderTimeoutMs: number;

  /** `address` is "host:port", "unix:/path" or any other gRPC target. The first call connects. */
  constructor(
    address = "localhost:50051",
    {
      security = {},
      timeoutMs = DEFAULT_TIMEOUT_MS,
      orderTimeoutMs = DEFAULT_ORDER_TIMEOUT_MS,
    }: ClientOptions = {},
  ) {
    this.#connection = new Connection(address, security);
    this.#timeoutMs = timeoutMs;
    this.#orderTimeoutMs = timeoutMs === Infinity ? Infinity : orderTimeoutMs;
  }

  /** Ends the connection. */
  close(): void {
    this.#connection.close();
  }

  /** Returns the whole output. Retried while no server takes it, until the deadline. */
  async generate(request: GenerateInit, options: CallOptions = {}): Promise<GenerateResponse> {
    const message = create(GenerateRequestSchema, request);
    const { generate } = InferenceService.method;
    return this.#connection.unary(generate, message, keyOf(message), this.#deadline(options), options.signal);
  }

  /** Returns an output that comes piece by piece. Nothing is sent before the iteration begins; never retried. */
  stream(request: GenerateInit, options: CallOptions = {}): Stream {
    const message = create(GenerateRequestSchema, request);
    const { stream } = InferenceService.method;
    return new Stream(() =>
      this.#connection.serverStream(stream, message, keyOf(message), this.#deadline(options), options.signal),
    );
  }

  /** Calls any other method with one answer, such as `ModelService.method.listModels`. */
  async call<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageInitShape<I>,
    options: CallOptions = {},
  ): Promise<MessageShape<O>> {
    const message = create(method.input, request);
    const timeoutMs = ORDERS.has(method) ? this.#orderTimeoutMs : this.#timeoutMs;
    const limit = this.#deadline({ timeoutMs, ...options });
    return this.#connection.unary(method, message, keyOf(message), limit, options.signal);
  }

  /** Yields the answers of any other method with many, such as `CacheService.method.watchStats`; without a
   * deadline unless `options` names one. */
  watch<I extends DescMessage, O extends DescMessage>(
    method: DescMethodServerStreaming<I, O>,
    request: MessageInitShape<I>,
    options: CallOptions = {},
  ): AsyncGenerator<MessageShape<O>, void, undefined> {
    const message = create(method.input, request);
    const limit = this.#deadline({ timeoutMs: Infinity, ...options });
    return this.#connection.serverStream(method, message, keyOf(message), limit, options.signal);
  }

  #deadline({ timeoutMs = this.#timeoutMs }: CallOptions): { deadline: number } {
    return { deadline: Date.now() + timeoutMs };
  }
}

function keyOf(request: Message): Readonly<Record<string, string>> {
  const key = prefixKey(request);
  return key ? { [PREFIX_KEY_HEADER]: key } : {};
}
