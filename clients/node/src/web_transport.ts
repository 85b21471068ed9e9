import {
  create,
  type DescMessage,
  type DescMethodServerStreaming,
  type DescMethodUnary,
  type Message,
  type MessageInitShape,
  type MessageShape,
} from "@bufbuild/protobuf";
import { AnySchema } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError, type Interceptor, type Transport as ConnectTransport } from "@connectrpc/connect";
import { createGrpcWebTransport } from "@connectrpc/connect-web";
import type { status } from "@grpc/grpc-js";

import { IcehouseError } from "./errors.js";
import { prefixBytes } from "./prefix.js";
import { UNAVAILABLE } from "./status.js";
import type { CallBounds, Transport } from "./transport.js";

const KEY_BYTES = 8;
/** Maximum time of a timer. */
const TIMER_LIMIT_MS = 2 ** 31 - 1;
/** The number in grpc-timeout has at most eight digits. */
const UNIT_LIMIT = 1e8;
const TYPE_PREFIX = "type.googleapis.com/";

/** Options for Connect. */
interface WebOptions {
  readonly interceptors?: readonly Interceptor[];
  readonly fetch?: typeof globalThis.fetch;
}

/** Speaks gRPC-Web to a server, with Connect-ES. */
export class WebTransport implements Transport {
  readonly #transport: ConnectTransport;
  readonly #open = new Set<Run>();

  constructor(url: string, { interceptors = [], fetch }: WebOptions) {
    this.#transport = createGrpcWebTransport({
      baseUrl: url,
      interceptors: [...interceptors],
      ...(fetch && { fetch }),
    });
  }

  /** Returns the key; "" on a page that is not secure, where browsers have no SHA-256. */
  async prefixKey(request: Message): Promise<string> {
    const bytes = prefixBytes(request);
    if (!bytes || !globalThis.crypto?.subtle) return "";
    const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
    return Array.from(hash.subarray(0, KEY_BYTES), (byte) => byte.toString(16).padStart(2, "0")).join("");
  }

  async unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageShape<I>,
    headers: Readonly<Record<string, string>>,
    bounds: CallBounds,
  ): Promise<MessageShape<O>> {
    const run = this.#opened(bounds);
    try {
      const sent = request as MessageInitShape<I>;
      return (await this.#transport.unary(method, run.signal, undefined, { ...headers, ...run.headers }, sent)).message;
    } catch (error) {
      throw errorFrom(error);
    } finally {
      this.#end(run);
    }
  }

  async *serverStream<I extends DescMessage, O extends DescMessage>(
    method: DescMethodServerStreaming<I, O>,
    request: MessageShape<I>,
    headers: Readonly<Record<string, string>>,
    bounds: CallBounds,
  ): AsyncGenerator<MessageShape<O>, void, undefined> {
    const run = this.#opened(bounds);
    try {
      const sent = only(request as MessageInitShape<I>);
      const all = { ...headers, ...run.headers };
      yield* (await this.#transport.stream(method, run.signal, undefined, all, sent)).message;
    } catch (error) {
      throw errorFrom(error);
    } finally {
      this.#end(run);
    }
  }

  close(): void {
    for (const run of this.#open) run.abort();
  }

  #opened(bounds: CallBounds): Run {
    const run = new Run(bounds);
    this.#open.add(run);
    return run;
  }

  #end(run: Run): void {
    this.#open.delete(run);
    run.abort();
  }
}

/** Ends a call at its deadline or on its caller's signal. Connect's own timer outlives a stream that is left early. */
class Run {
  readonly headers: Readonly<Record<string, string>>;
  readonly #controller = new AbortController();
  readonly #timer: ReturnType<typeof setTimeout> | undefined;

  constructor({ deadline, signal }: CallBounds) {
    const leftMs = Math.ceil(Math.max(0, deadline - Date.now()));
    const timeout = leftMs < UNIT_LIMIT ? `${leftMs}m` : `${Math.ceil(leftMs / 1000)}S`;
    this.headers = leftMs === Infinity ? {} : { "grpc-timeout": timeout };
    if (leftMs <= TIMER_LIMIT_MS) {
      const late = () => this.#controller.abort(new ConnectError("the deadline passed", Code.DeadlineExceeded));
      this.#timer = setTimeout(late, leftMs);
    }
    if (signal?.aborted) this.abort();
    else signal?.addEventListener("abort", () => this.abort(), { once: true, signal: this.#controller.signal });
  }

  get signal(): AbortSignal {
    return this.#controller.signal;
  }

  abort(): void {
    clearTimeout(this.#timer);
    this.#controller.abort();
  }
}

async function* only<T>(request: T): AsyncGenerator<T, void, undefined> {
  yield request;
}

/** Returns what a call threw as IcehouseError. Connect's codes are those of gRPC. */
function errorFrom(thrown: unknown): IcehouseError {
  const error = ConnectError.from(thrown);
  const details = error.details.flatMap((detail) =>
    "value" in detail && detail.value instanceof Uint8Array && "type" in detail
      ? [create(AnySchema, { typeUrl: TYPE_PREFIX + detail.type, value: detail.value })]
      : [],
  );
  // This is how browsers report that there is no connection.
  const code: status = error.cause instanceof TypeError ? UNAVAILABLE : (error.code as number);
  return new IcehouseError({ code, message: error.rawMessage, details, cause: error });
}
