import {
  type DescMessage,
  type DescMethodServerStreaming,
  type DescMethodUnary,
  fromBinary,
  type MessageShape,
  toBinary,
} from "@bufbuild/protobuf";
import {
  type CallOptions,
  type ClientReadableStream,
  Client as GrpcClient,
  type Interceptor,
  Metadata,
} from "@grpc/grpc-js";
import { readFileSync } from "node:fs";

import { errorFrom } from "./errors.js";
import { channelCredentials, type Security } from "./security.js";
import { BearerToken } from "./token.js";

/**
 * The published service config: Generate, Embed and Rerank are retried when no server took them, and calls go
 * to all servers that the address names. (gRPC for Node does not look at health itself, so that part has no
 * effect.)
 */
export const SERVICE_CONFIG = readFileSync(new URL("../../service_config.json", import.meta.url), "utf8");

/** Speaks to a server in the messages of protobuf-es. */
export class Connection {
  readonly #client: GrpcClient;
  readonly #token: BearerToken;

  constructor(address: string, security: Security, interceptors: readonly Interceptor[]) {
    this.#token = new BearerToken(security.token);
    this.#client = new GrpcClient(address, channelCredentials(security), {
      "grpc.service_config": SERVICE_CONFIG,
      // A prompt's tokens or a long output may pass gRPC's 4 MB.
      "grpc.max_receive_message_length": -1,
      interceptors: [...interceptors],
      ...(security.serverName && { "grpc.ssl_target_name_override": security.serverName }),
    });
  }

  /** Sends one request and returns its answer; `signal` cancels it. */
  async unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageShape<I>,
    headers: Readonly<Record<string, string>>,
    options: CallOptions,
    signal: AbortSignal | undefined,
  ): Promise<MessageShape<O>> {
    const plain = metadataOf(headers);
    const sent = await this.#token.authorized(plain);
    try {
      return await this.#unary(method, request, sent, options, signal);
    } catch (error) {
      if (!(await this.#token.isRenewed(error, plain, sent))) throw error;
    }
    return this.#unary(method, request, await this.#token.authorized(plain), options, signal);
  }

  async #unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageShape<I>,
    metadata: Metadata,
    options: CallOptions,
    signal: AbortSignal | undefined,
  ): Promise<MessageShape<O>> {
    return new Promise((resolve, reject) => {
      const call = this.#client.makeUnaryRequest(
        pathOf(method),
        (message: MessageShape<I>) => Buffer.from(toBinary(method.input, message)),
        (bytes) => fromBinary(method.output, bytes),
        request,
        metadata,
        options,
        (error, response) => {
          signal?.removeEventListener("abort", cancel);
          if (error) reject(errorFrom(error));
          else resolve(response as MessageShape<O>);
        },
      );
      const cancel = () => call.cancel();
      cancelOn(signal, cancel);
    });
  }

  /** Sends one request and yields its answers. Leaving early, or `signal`, ends the call on the server too. */
  async *serverStream<I extends DescMessage, O extends DescMessage>(
    method: DescMethodServerStreaming<I, O>,
    request: MessageShape<I>,
    headers: Readonly<Record<string, string>>,
    options: CallOptions,
    signal: AbortSignal | undefined,
  ): AsyncGenerator<MessageShape<O>, void, undefined> {
    const plain = metadataOf(headers);
    const sent = await this.#token.authorized(plain);
    let isAnswered = false;
    try {
      for await (const response of this.#serverStream(method, request, sent, options, signal)) {
        isAnswered = true;
        yield response;
      }
      return;
    } catch (error) {
      if (isAnswered || !(await this.#token.isRenewed(error, plain, sent))) throw error;
    }
    yield* this.#serverStream(method, request, await this.#token.authorized(plain), options, signal);
  }

  async *#serverStream<I extends DescMessage, O extends DescMessage>(
    method: DescMethodServerStreaming<I, O>,
    request: MessageShape<I>,
    metadata: Metadata,
    options: CallOptions,
    signal: AbortSignal | undefined,
  ): AsyncGenerator<MessageShape<O>, void, undefined> {
    const call: ClientReadableStream<MessageShape<O>> = this.#client.makeServerStreamRequest(
      pathOf(method),
      (message: MessageShape<I>) => Buffer.from(toBinary(method.input, message)),
      (bytes) => fromBinary(method.output, bytes),
      request,
      metadata,
      options,
    );
    const cancel = () => call.cancel();
    cancelOn(signal, cancel);
    // The iteration below throws what is emitted; a status that comes after it was left concerns nobody.
    call.on("error", () => undefined);
    try {
      yield* call;
    } catch (error) {
      throw errorFrom(error);
    } finally {
      signal?.removeEventListener("abort", cancel);
      call.cancel();
    }
  }

  /** Ends the connection and what runs on it. */
  close(): void {
    this.#client.close();
  }
}

function metadataOf(headers: Readonly<Record<string, string>>): Metadata {
  const metadata = new Metadata();
  for (const [name, value] of Object.entries(headers)) metadata.set(name, value);
  return metadata;
}

function pathOf(method: { readonly parent: { readonly typeName: string }; readonly name: string }): string {
  return `/${method.parent.typeName}/${method.name}`;
}

function cancelOn(signal: AbortSignal | undefined, cancel: () => void): void {
  if (signal?.aborted) cancel();
  else signal?.addEventListener("abort", cancel, { once: true });
}
