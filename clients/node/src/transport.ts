import type { DescMessage, DescMethodServerStreaming, DescMethodUnary, Message, MessageShape } from "@bufbuild/protobuf";

/** Limits of a call. */
export interface CallBounds {
  /** In milliseconds since 1970; Infinity for none. */
  readonly deadline: number;
  /** Ends the call with CANCELLED. */
  readonly signal: AbortSignal | undefined;
}

/** Carries calls to a server: gRPC in Node, gRPC-Web in browsers. Throws IcehouseError. */
export interface Transport {
  /** Returns the request's prefix key; "" if it has none. */
  prefixKey(request: Message): string | Promise<string>;

  /** Sends one request and returns its answer. */
  unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageShape<I>,
    headers: Readonly<Record<string, string>>,
    bounds: CallBounds,
  ): Promise<MessageShape<O>>;

  /** Sends one request and yields its answers. If the iteration is left early, the call ends on the server too. */
  serverStream<I extends DescMessage, O extends DescMessage>(
    method: DescMethodServerStreaming<I, O>,
    request: MessageShape<I>,
    headers: Readonly<Record<string, string>>,
    bounds: CallBounds,
  ): AsyncGenerator<MessageShape<O>, void, undefined>;

  /** Closes the connection and ends its calls. */
  close(): void;
}
