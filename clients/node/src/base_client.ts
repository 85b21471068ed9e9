import {
  create,
  type DescMessage,
  type DescMethodServerStreaming,
  type DescMethodUnary,
  type MessageInitShape,
  type MessageShape,
} from "@bufbuild/protobuf";

import { CacheClient } from "./cache.js";
import { type CallOptions, Calls, DEFAULT_ORDER_TIMEOUT_MS, DEFAULT_TIMEOUT_MS } from "./calls.js";
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
import { type RequestInfo, type Server, ServerService } from "./gen/icehouse/v1/server_service_pb.js";
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

/** What every client may be told. */
export interface BaseClientOptions {
  /** The deadline of calls that name none; Infinity for no deadline. Absent: DEFAULT_TIMEOUT_MS. */
  readonly timeoutMs?: number;
  /** That of Warm, Evict and Verify, unless `timeoutMs` is Infinity. Absent: DEFAULT_ORDER_TIMEOUT_MS. */
  readonly orderTimeoutMs?: number;
  /**
   * How often generate, embed and rerank are sent again where the server refuses them for now and says when to come
   * back (`retryAfterMs`), but never past their deadline. Absent: 0.
   */
  readonly retryLimit?: number;
}

/** Options of a cancel. */
export interface CancelOptions extends CallOptions {
  /** Whose request it is, for operators: to be named where several tenants have one of this id; "" is the default. */
  readonly tenant?: string | undefined;
}

export const BASE_OPTION_NAMES: readonly string[] = ["timeoutMs", "orderTimeoutMs", "retryLimit"];

/** The calls of a client, whatever carries them: Node's and the browser's are made of it. */
export class BaseClient {
  /** The server's prefix cache: warm, explain, pin, unpin, evict, verify, watchStats. */
  readonly cache: CacheClient;
  readonly #calls: Calls;

  constructor(transport: Transport, token: BearerToken, options: BaseClientOptions) {
    const { timeoutMs = DEFAULT_TIMEOUT_MS, orderTimeoutMs = DEFAULT_ORDER_TIMEOUT_MS, retryLimit = 0 } = options;
    this.#calls = new Calls(transport, token, { timeoutMs, orderTimeoutMs, retryLimit });
    this.cache = new CacheClient(this.#calls);
  }

  /** Ends the connection. */
  close(): void {
    this.#calls.close();
  }

  /**
   * Returns once the server takes requests: it listens, be it yet to start, and its model is loaded. Throws
   * DEADLINE_EXCEEDED when late, with what came last in the message.
   */
  async waitReady(options: CallOptions = {}): Promise<Server> {
    const timeoutMs = options.timeoutMs ?? this.#calls.timeoutMs;
    return readyServer((leftMs) => this.getServer({ ...options, timeoutMs: leftMs }), timeoutMs, options.signal);
  }

  /** Returns the whole output. Retried while no server takes it, until the deadline. */
  async generate(request: GenerateInit, options: CallOptions = {}): Promise<GenerateResponse> {
    return this.#calls.unary(
      InferenceService.method.generate,
      promptedRequestFrom(GenerateRequestSchema, request),
      options,
    );
  }

  /**
   * Returns an output in JSON as `parser` reads it, a schema of zod for example. The output is held to the
   * request's `responseFormat`; without one, to the JSON schema that the parser tells.
   */
  async generateJson<T>(request: GenerateInit, parser: Parser<T>, options: CallOptions = {}): Promise<T> {
    const message = promptedRequestFrom(GenerateRequestSchema, request);
    message.responseFormat ??= create(ResponseFormatSchema, { format: { case: "jsonSchema", value: jsonSchemaOf(parser) } });
    return jsonOf(await this.#calls.unary(InferenceService.method.generate, message, options), parser);
  }

  /** Returns an output that comes piece by piece. Nothing is sent before the iteration begins; never retried. */
  stream(request: GenerateInit, options: CallOptions = {}): Stream {
    const message = promptedRequestFrom(GenerateRequestSchema, request);
    const bounded = { ...options, timeoutMs: options.timeoutMs ?? this.#calls.timeoutMs };
    const begin = () => this.#calls.serverStream(InferenceService.method.stream, message, bounded);
    return new Stream(begin, message.completions);
  }

  /** Returns a vector for each input, and what they cost. Retried as generate is. */
  async embed(request: EmbedInit, options: CallOptions = {}): Promise<EmbedResponse> {
    return this.#calls.unary(EmbeddingService.method.embed, embedRequestFrom(request), options);
  }

  /** Returns the documents in the order in which they answer the query, best first. Retried as generate is. */
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

  /** Returns the server's counters. */
  async cacheStats(options: CallOptions = {}): Promise<CacheStatsResponse> {
    return this.call(InferenceService.method.cacheStats, {}, options);
  }

  /** Returns the server's version, state, features and limits. Answered while the model loads, too. */
  async getServer(options: CallOptions = {}): Promise<Server> {
    return present((await this.call(ServerService.method.getServer, {}, options)).server);
  }

  /** Returns the requests that wait or run, the oldest first: an operator's sees those of all tenants. */
  async listRequests(options: CallOptions = {}): Promise<RequestInfo[]> {
    const found: RequestInfo[] = [];
    for (let pageToken = ""; ; ) {
      const page = await this.call(ServerService.method.listRequests, { pageSize: 1000, pageToken }, options);
      found.push(...page.requests);
      if (!page.nextPageToken) return found;
      pageToken = page.nextPageToken;
    }
  }

  /** Ends a request, another caller's too for operators; returns what it was. */
  async cancelRequest(requestId: string, { tenant, ...options }: CancelOptions = {}): Promise<RequestInfo> {
    const request = { requestId, ...(tenant !== undefined && { tenant }) };
    return present((await this.call(ServerService.method.cancelRequest, request, options)).request);
  }

  /** Calls any other method with one answer, such as `ModelService.method.getModel`. */
  async call<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageInitShape<I>,
    options: CallOptions = {},
  ): Promise<MessageShape<O>> {
    return this.#calls.unary(method, requestFrom(method.input, request), options);
  }

  /** Yields the answers of any other method with many; without a deadline unless `options` name one. */
  watch<I extends DescMessage, O extends DescMessage>(
    method: DescMethodServerStreaming<I, O>,
    request: MessageInitShape<I>,
    options: CallOptions = {},
  ): AsyncGenerator<MessageShape<O>, void, undefined> {
    return this.#calls.serverStream(method, requestFrom(method.input, request), options);
  }
}

function present<T>(value: T | undefined): T {
  if (value === undefined) throw new Error("the server left out what its API always sends; is it newer than this client?");
  return value;
}
