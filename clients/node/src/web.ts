/**
 * Client of Icehouse for browsers, over gRPC-Web: `icehouse-client/web`. Servers speak gRPC, so it needs an Envoy in
 * front of them (deploy/envoy), and the packages @connectrpc/connect and @connectrpc/connect-web.
 */
import type { Interceptor } from "@connectrpc/connect";

import { BASE_OPTION_NAMES, BaseClient, type BaseClientOptions } from "./base_client.js";
import { refuseUnknownOptions } from "./options.js";
import { BearerToken, type TokenSource } from "./token.js";
import { WebTransport } from "./web_transport.js";

export type { CancelOptions, WatchStatsOptions } from "./base_client.js";
export { CacheClient, type CommandOptions, type EvictAllOptions } from "./cache.js";
export { type CallOptions, DEFAULT_COMMAND_TIMEOUT_MS, DEFAULT_TIMEOUT_MS } from "./calls.js";
export { type Answer, Conversation, type ConversationOptions, type ImageInit, type ToolInit } from "./conversation.js";
export { IcehouseError } from "./errors.js";
export { type Parser } from "./json.js";
export { PREFIX_KEY_HEADER } from "./prefix.js";
export { type Output, type Reply, Stream } from "./stream.js";
export { type TokenSource } from "./token.js";

export interface ClientOptions extends BaseClientOptions {
  /**
   * Sent with every call as a bearer token. Everyone can read what a page sends, so it should be the user's own. A
   * function is called once, and again when the server refuses the token; the refused call is then sent once more.
   */
  readonly token?: string | TokenSource;
  /** Interceptors of Connect, for example for tracing. They see every attempt of a call. */
  readonly interceptors?: readonly Interceptor[];
  /** Used instead of the browser's own, for example to send cookies. */
  readonly fetch?: typeof globalThis.fetch;
}

/**
 * A client of the Envoy at a URL, with the same methods as the client for Node. Every method throws IcehouseError, and
 * TypeError for an unknown field or option. Envoy does what gRPC's own retries do in Node.
 */
export class Client extends BaseClient {
  /** `url` is the origin of Envoy, such as "https://models.example.com:8443". */
  constructor(url: string, options: ClientOptions = {}) {
    refuseUnknownOptions(options, [...BASE_OPTION_NAMES, "token", "interceptors", "fetch"]);
    super(new WebTransport(url, options), new BearerToken(options.token), options);
  }
}
