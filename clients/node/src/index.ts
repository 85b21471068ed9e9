/** Client of Icehouse. The messages of the API are in `icehouse-client/v1/<proto file>`. */

export { PREFIX_KEY_HEADER, prefixKey } from "./affinity.js";
export type { CancelOptions, WatchStatsOptions } from "./base_client.js";
export { CacheClient, type CommandOptions, type EvictAllOptions } from "./cache.js";
export { type CallOptions, DEFAULT_COMMAND_TIMEOUT_MS, DEFAULT_TIMEOUT_MS } from "./calls.js";
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
  type PromptForm,
  type PromptInit,
  type RerankInit,
  type TokenizeInit,
  type UnpinInit,
  type VerifyInit,
  type WarmInit,
} from "./requests.js";
export { type RoleName } from "./roles.js";
export { type Security } from "./security.js";
export { type Output, type Reply, Stream } from "./stream.js";
export { type TokenSource } from "./token.js";
