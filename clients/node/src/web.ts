/**
 * Client of Icehouse for browsers, by gRPC-Web: `icehouse-client/web`. The server speaks gRPC, so that an Envoy
 * stands between (deploy/envoy). Needs the packages @connectrpc/connect and @connectrpc/connect-web.
 */
import type { Interceptor } from "@connectrpc/connect";

import { BASE_OPTION_NAMES, BaseClient, type BaseClientOptions } from "./base_client.js";
import { refuseUnknownOptions } from "./options.js";
import { BearerToken, type TokenSource } from "./token.js";
import { WebTransport } from "./web_transport.js";

export type { CancelOptions } from "./base_client.js";
export { CacheClient, type EvictAllOptions, type ProgressOptions, type WatchStatsOptions } from "./cache.js";
export { type CallOptions, DEFAULT_ORDER_TIMEOUT_MS, DEFAULT_TIMEOUT_MS } from "./calls.js";
export { type Answer, Conversation, type ConversationOptions, type ImageInit, type ToolInit } from "./conversation.js";
export { IcehouseError } from "./errors.js";
export { type Parser } from "./json.js";
export { PREFIX_KEY_HEADER } from "./prefix.js";
export { type Output, type Reply, Stream } from "./stream.js";
export { type TokenSource } from "./token.js";

export interface ClientOptions extends BaseClientOptions {
  /**
   * Goes with every call as a bearer token; everyone can read what a page sends, so let it be the user's own. What a
   * source returns is kept until the server refuses it; then the source is asked anew and the refused call made
   * again, once.
   */
  readonly token?: string | TokenSource;
  /** Connect's own, such as those of tracing; each sees every attempt of a call. */
  readonly interceptors?: readonly Interceptor[];
  /** In place of the browser's own, such as one that sends cookies. */
  readonly fetch?: typeof globalThis.fetch;
}

/**
 * A client of the Envoy at a URL, with the methods of Node's client. gRPC's own retries are Envoy's here. Every
 * method throws IcehouseError, and TypeError for a field or an option that there is none of.
 */
export class Client extends BaseClient {
  /** `url` is Envoy's origin: "https://models.example.com:8443". */
  constructor(url: string, options: ClientOptions = {}) {
    refuseUnknownOptions(options, [...BASE_OPTION_NAMES, "token", "interceptors", "fetch"]);
    super(new WebTransport(url, options), new BearerToken(options.token), options);
  }
}
