import {
  create,
  type DescMessage,
  type DescMethodServerStreaming,
  type DescMethodUnary,
  type MessageInitShape,
  type MessageShape,
} from "@bufbuild/protobuf";
import { durationFromMs } from "@bufbuild/protobuf/wkt";

import { CacheClient } from "./cache.js";
import { type CallOptions, Calls, DEFAULT_COMMAND_TIMEOUT_MS, DEFAULT_TIMEOUT_MS } from "./calls.js";
import { type EmbedResponse, EmbeddingService } from "./gen/icehouse/v1/embedding_service_pb.js";
import {
  type CacheStatsResponse,
  type DetokenizeResponse,
  GenerateRequestSchema,
  type GenerateResponse,
  InferenceService,
  type TokenizeResponse,
} from "./gen/icehouse/v1/inference_service_pb.js";
import { type Model, ModelService } from "./gen/icehouse/v1/model_service_pb.js";
import { ResponseFormatSchema } from "./gen/icehouse/v1/response_format_pb.js";
import { type RerankResponse, RerankService } from "./gen/icehouse/v1/rerank_service_pb.js";
import { type RequestInfo, type Server, ServerService, type ServerStats } from "./gen/icehouse/v1/server_service_pb.js";
import { jsonOf, jsonSchemaOf, type Parser } from "./json.js";
import { readyServer } from "./readiness.js";
import {
  type DetokenizeInit,
  type EmbedInit,
  embedRequestFrom,
  type GenerateInit,
  promptedRequestFrom,
  type RerankInit,
  requestFrom,
  type TokenizeInit,
} from "./requests.js";
import { Stream } from "./stream.js";
import type { BearerToken } from "./token.js";
import type { Transport } from "./transport.js";

/** Options of every client. */
export interface BaseClientOptions {
  /** Deadline of calls that set none; Infinity for no deadline. Default: DEFAULT_TIMEOUT_MS. */
  readonly timeoutMs?: number;
  /**
   * The same for the cache's warm, evict, evictAll and verify. Default: DEFAULT_COMMAND_TIMEOUT_MS. No deadline either
   * if `timeoutMs` is Infinity.
   */
  readonly commandTimeoutMs?: number;
  /**
   * How many times generate, embed and rerank are sent again when the server refuses them for now and says when to try
   * again (`retryAfterMs`). They are never sent again after their deadline. Default: 0.
   */
  readonly retryLimit?: number;
}

/** Options of `cancelRequest`. */
export interface CancelOptions extends CallOptions {
  /**
   * The request's tenant, for operators: required if several tenants have a request with this id; "" is the default
   * tenant.
   */
  readonly tenant?: string | undefined;
}

/** Options of `watchStats`. */
export interface WatchStatsOptions extends CallOptions {
  /** Time between two answers, 100 to 3,600,000. Default: 1000. */
  readonly intervalMs?: number | undefined;
}

export const BASE_OPTION_NAMES: readonly string[] = ["timeoutMs", "commandTimeoutMs", "retryLimit"];

/** The calls that the clients for Node and for browsers share. */
export class BaseClient {
  /** The server's prefix cache: explain, warm, pin, unpin, evict, evictAll, verify. */
  readonly cache: CacheClient;
  readonly #calls: Calls;

  constructor(transport: Transport, token: BearerToken, options: BaseClientOptions) {
    this.#calls = new Calls(transport, token, {
      timeoutMs: options.timeoutMs ?? DEFAULT_TIMEOUT_MS,
      commandTimeoutMs: options.commandTimeoutMs ?? DEFAULT_COMMAND_TIMEOUT_MS,
      retryLimit: options.retryLimit ?? 0,
    });
    this.cache = new CacheClient(this.#calls);
  }

  /** Closes the connection. */
  close(): void {
    this.#calls.close();
  }

  /**
   * Waits until the server accepts requests: it may still have to start and to load its model. If that takes too long,
   * throws DEADLINE_EXCEEDED, whose message says what the server answered last.
   */
  async waitReady(options: CallOptions = {}): Promise<Server> {
    const timeoutMs = options.timeoutMs ?? this.#calls.timeoutMs;
    return readyServer((leftMs) => this.getServer({ ...options, timeoutMs: leftMs }), timeoutMs, options.signal);
  }

  /** Returns the whole output. Retried until the deadline while no server is available. */
  async generate(request: GenerateInit, options: CallOptions = {}): Promise<GenerateResponse> {
    return this.#calls.unary(
      InferenceService.method.generate,
      promptedRequestFrom(GenerateRequestSchema, request),
      options,
    );
  }

  /**
   * Returns an output in JSON as `parser` reads it, such as a schema of zod. The output is constrained to the request's
   * `responseFormat`, or else to the JSON schema of the parser. Throws if a limit cut the output.
   */
  async generateJson<T>(request: GenerateInit, parser: Parser<T>, options: CallOptions = {}): Promise<T> {
    const message = promptedRequestFrom(GenerateRequestSchema, request);
    message.responseFormat ??= create(ResponseFormatSchema, { format: { case: "jsonSchema", value: jsonSchemaOf(parser) } });
    return jsonOf(await this.#calls.unary(InferenceService.method.generate, message, options), parser);
  }

  /** Returns an output that arrives in pieces. The request is sent when the iteration begins; it is never retried. */
  stream(request: GenerateInit, options: CallOptions = {}): Stream {
    const message = promptedRequestFrom(GenerateRequestSchema, request);
    const bounded = { ...options, timeoutMs: options.timeoutMs ?? this.#calls.timeoutMs };
    const begin = () => this.#calls.serverStream(InferenceService.method.stream, message, bounded);
    return new Stream(begin, message.completions);
  }

  /** Returns a vector for each input. Retried as generate is. */
  async embed(request: EmbedInit, options: CallOptions = {}): Promise<EmbedResponse> {
    return this.#calls.unary(EmbeddingService.method.embed, embedRequestFrom(request), options);
  }

  /** Ranks documents by how well they answer a query, best first. Retried as generate is. */
  async rerank(request: RerankInit, options: CallOptions = {}): Promise<RerankResponse> {
    return this.call(RerankService.method.rerank, request, options);
  }

  /** Returns the tokens of a prompt. */
  async tokenize(request: TokenizeInit, options: CallOptions = {}): Promise<TokenizeResponse> {
    const { tokenize } = InferenceService.method;
    return this.#calls.unary(tokenize, promptedRequestFrom(tokenize.input, request), options);
  }

  /** Returns the text of tokens. */
  async detokenize(request: DetokenizeInit, options: CallOptions = {}): Promise<DetokenizeResponse> {
    return this.call(InferenceService.method.detokenize, request, options);
  }

  /** Returns the served models. */
  async listModels(options: CallOptions = {}): Promise<Model[]> {
    return (await this.call(ModelService.method.listModels, {}, options)).models;
  }

  /** Returns the counters of the prefix cache. Only for operators if callers authenticate. */
  async cacheStats(options: CallOptions = {}): Promise<CacheStatsResponse> {
    return this.call(InferenceService.method.cacheStats, {}, options);
  }

  /** Returns the counters of the engine, the cache and the tenants. */
  async getStats(options: CallOptions = {}): Promise<ServerStats> {
    return present((await this.call(ServerService.method.getStats, {}, options)).stats);
  }

  /** Yields the counters of `getStats` at once and then at an interval, until you leave the loop. */
  async *watchStats({ intervalMs, ...options }: WatchStatsOptions = {}): AsyncGenerator<ServerStats, void, undefined> {
    const request = intervalMs === undefined ? {} : { interval: durationFromMs(intervalMs) };
    for await (const { stats } of this.watch(ServerService.method.watchStats, request, options)) yield present(stats);
  }

  /** Returns the server's version, state, features and limits. Answers while the model loads, too. */
  async getServer(options: CallOptions = {}): Promise<Server> {
    return present((await this.call(ServerService.method.getServer, {}, options)).server);
  }

  /** Returns the requests that wait or run, oldest first. Operators get those of all tenants. */
  async listRequests(options: CallOptions = {}): Promise<RequestInfo[]> {
    const found: RequestInfo[] = [];
    for (let pageToken = ""; ; ) {
      const page = await this.call(ServerService.method.listRequests, { pageSize: 1000, pageToken }, options);
      found.push(...page.requests);
      if (!page.nextPageToken) return found;
      pageToken = page.nextPageToken;
    }
  }

  /** Cancels a request and returns it as it was. Operators may cancel those of all tenants. */
  async cancelRequest(requestId: string, { tenant, ...options }: CancelOptions = {}): Promise<RequestInfo> {
    const request = { requestId, ...(tenant !== undefined && { tenant }) };
    return present((await this.call(ServerService.method.cancelRequest, request, options)).request);
  }

  /** Calls any method that has one answer, such as `ModelService.method.getModel`. */
  async call<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageInitShape<I>,
    options: CallOptions = {},
  ): Promise<MessageShape<O>> {
    return this.#calls.unary(method, requestFrom(method.input, request), options);
  }

  /** Yields the answers of any method that streams them. It has no deadline unless `options` set one. */
  watch<I extends DescMessage, O extends DescMessage>(
    method: DescMethodServerStreaming<I, O>,
    request: MessageInitShape<I>,
    options: CallOptions = {},
  ): AsyncGenerator<MessageShape<O>, void, undefined> {
    return this.#calls.serverStream(method, requestFrom(method.input, request), options);
  }
}

function present<T>(value: T | undefined): T {
  if (value === undefined) throw new Error("the answer lacks a required field; is the server newer than this client?");
  return value;
}
