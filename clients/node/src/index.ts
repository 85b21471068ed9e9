/** Client of Icehouse. The API's own messages are in `icehouse-client/v1/<proto file>`. */

export { PREFIX_KEY_HEADER, prefixKey } from "./affinity.js";
export type { CancelOptions } from "./base_client.js";
export { CacheClient, type EvictAllOptions, type ProgressOptions, type WatchStatsOptions } from "./cache.js";
export { type CallOptions, DEFAULT_ORDER_TIMEOUT_MS, DEFAULT_TIMEOUT_MS } from "./calls.js";
export { Client, type ClientOptions } from "./client.js";
export { SERVICE_CONFIG } from "./connection.js";
export { type Answer, Conversation, type ConversationOptions, type ImageInit, type ToolInit } from "./conversation.js";
export { IcehouseError } from "./errors.js";
export { type Parser } from "./json.js";
export {
  type ChatInit,
  type ChatMessageInit,
  type DetokenizeInit,
  type EmbedInit,
  type EvictInit,
  type ExplainInit,
  type GenerateInit,
  type PinInit,
  type Prompt,
  type RerankInit,
  type TokenizeInit,
  type UnpinInit,
  type VerifyInit,
  type WarmInit,
} from "./requests.js";
export { type Security } from "./security.js";
export { type Output, type Reply, Stream } from "./stream.js";
export { type TokenSource } from "./token.js";
