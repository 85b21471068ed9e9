import {
  type DescMessage,
  type DescMethodServerStreaming,
  type DescMethodUnary,
  fromBinary,
  type Message,
  type MessageShape,
  toBinary,
} from "@bufbuild/protobuf";
import {
  type ClientReadableStream,
  Client as GrpcClient,
  type Interceptor,
  Metadata,
  type ServiceError,
} from "@grpc/grpc-js";
import { readFileSync } from "node:fs";

import { prefixKey } from "./affinity.js";
import { IcehouseError } from "./errors.js";
import { StatusSchema } from "./gen/google/rpc/status_pb.js";
import { isLocal } from "./local.js";
import { channelCredentials, type Security } from "./security.js";
import type { CallBounds, Transport } from "./transport.js";

const DETAILS_KEY = "grpc-status-details-bin";

/**
 * The published service config: Generate, Embed and Rerank are retried while no server is available, and calls are
 * spread over all servers that the address names. Its health checks have no effect, because gRPC for Node has none.
 */
export const SERVICE_CONFIG = readFileSync(new URL("../../service_config.json", import.meta.url), "utf8");

/** Speaks to a server by gRPC, in the messages of protobuf-es. */
export class Connection implements Transport {
  readonly #client: GrpcClient;

  constructor(address: string, security: Security, interceptors: readonly Interceptor[]) {
    this.#client = new GrpcClient(address, channelCredentials(security), {
      "grpc.service_config": SERVICE_CONFIG,
      // The tokens of a prompt or a long output may exceed gRPC's default of 4 MB.
      "grpc.max_receive_message_length": -1,
      interceptors: [...interceptors],
      ...(isLocal(address) && { "grpc.enable_http_proxy": 0 }),
      ...(security.serverName && { "grpc.ssl_target_name_override": security.serverName }),
    });
  }

  prefixKey(request: Message): string {
    return prefixKey(request);
  }

  async unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageShape<I>,
    headers: Readonly<Record<string, string>>,
    { deadline, signal }: CallBounds,
  ): Promise<MessageShape<O>> {
    return new Promise((resolve, reject) => {
      const call = this.#client.makeUnaryRequest(
        pathOf(method),
        (message: MessageShape<I>) => Buffer.from(toBinary(method.input, message)),
        (bytes) => fromBinary(method.output, bytes),
        request,
        metadataOf(headers),
        { deadline },
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

  async *serverStream<I extends DescMessage, O extends DescMessage>(
    method: DescMethodServerStreaming<I, O>,
    request: MessageShape<I>,
    headers: Readonly<Record<string, string>>,
    { deadline, signal }: CallBounds,
  ): AsyncGenerator<MessageShape<O>, void, undefined> {
    const call: ClientReadableStream<MessageShape<O>> = this.#client.makeServerStreamRequest(
      pathOf(method),
      (message: MessageShape<I>) => Buffer.from(toBinary(method.input, message)),
      (bytes) => fromBinary(method.output, bytes),
      request,
      metadataOf(headers),
      { deadline },
    );
    const cancel = () => call.cancel();
    cancelOn(signal, cancel);
    // The iteration below throws what is emitted. Nobody needs a status that comes after it was left.
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

/** Returns a gRPC error as IcehouseError, and any other as it is. */
function errorFrom(error: unknown): unknown {
  if (!isServiceError(error)) return error;
  const [packed] = error.metadata.get(DETAILS_KEY);
  const details = Buffer.isBuffer(packed) ? fromBinary(StatusSchema, packed).details : [];
  return new IcehouseError({ code: error.code, message: error.details, details, cause: error });
}

function isServiceError(error: unknown): error is ServiceError {
  return error instanceof Error && "code" in error && "details" in error && "metadata" in error;
}
