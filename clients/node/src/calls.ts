import type {
  DescMessage,
  DescMethod,
  DescMethodServerStreaming,
  DescMethodUnary,
  Message,
  MessageShape,
} from "@bufbuild/protobuf";

import { EmbeddingService } from "./gen/icehouse/v1/embedding_service_pb.js";
import { InferenceService } from "./gen/icehouse/v1/inference_service_pb.js";
import { RerankService } from "./gen/icehouse/v1/rerank_service_pb.js";
import { refuseUnknownOptions } from "./options.js";
import { PREFIX_KEY_HEADER } from "./prefix.js";
import { sentAgain } from "./retries.js";
import type { BearerToken } from "./token.js";
import type { CallBounds, Transport } from "./transport.js";

/** The default deadline of all other calls. */
export const DEFAULT_TIMEOUT_MS = 120_000;

/** The default deadline of warm, evict, evictAll and verify: a long prompt or a large disk takes its time. */
export const DEFAULT_COMMAND_TIMEOUT_MS = 3_600_000;

/** Methods that are sent again when the server refuses them for now. */
const RETRIED: ReadonlySet<DescMethod> = new Set([
  InferenceService.method.generate,
  EmbeddingService.method.embed,
  RerankService.method.rerank,
]);

export interface CallOptions {
  /** The call ends with DEADLINE_EXCEEDED after this time; Infinity for no deadline. Default: the client's. */
  readonly timeoutMs?: number | undefined;
  /** Ends the call with CANCELLED, on the server too. */
  readonly signal?: AbortSignal | undefined;
  /** Headers of this call; an "authorization" among them replaces the client's token. */
  readonly metadata?: Readonly<Record<string, string>> | undefined;
}

/** What applies to calls whose options say nothing else. */
export interface CallDefaults {
  readonly timeoutMs: number;
  readonly commandTimeoutMs: number;
  readonly retryLimit: number;
}

/** The calls of one connection, each with its deadline and, if it has a prompt, its prefix key. */
export class Calls {
  readonly #transport: Transport;
  readonly #token: BearerToken;
  readonly timeoutMs: number;
  readonly commandTimeoutMs: number;
  readonly #retryLimit: number;

  constructor(transport: Transport, token: BearerToken, { timeoutMs, commandTimeoutMs, retryLimit }: CallDefaults) {
    if (!Number.isInteger(retryLimit) || retryLimit < 0) {
      throw new RangeError(`retryLimit is ${retryLimit}; it must be an integer of at least 0`);
    }
    this.#transport = transport;
    this.#token = token;
    this.timeoutMs = timeoutMs;
    this.commandTimeoutMs = timeoutMs === Infinity ? Infinity : commandTimeoutMs;
    this.#retryLimit = retryLimit;
  }

  /** Sends one request and returns its answer. */
  async unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageShape<I>,
    options: CallOptions,
  ): Promise<MessageShape<O>> {
    const bounds = boundsOf(options, this.timeoutMs);
    const headers = await this.#headersOf(request, options);
    const attempt = () =>
      this.#token.once(headers, (sent) => this.#transport.unary(method, request, sent, bounds));
    return sentAgain(attempt, { limit: RETRIED.has(method) ? this.#retryLimit : 0, ...bounds });
  }

  /** Sends one request and yields its answers. There is no deadline unless `options` set one. */
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

  /** Closes the connection and ends its calls. */
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
