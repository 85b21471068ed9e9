/** Client of Icehouse. The API's own messages are in `icehouse-client/v1/<proto file>`. */

export { PREFIX_KEY_HEADER, prefixKey } from "./affinity.js";
export {
  type CallOptions,
  Client,
  type ClientOptions,
  DEFAULT_ORDER_TIMEOUT_MS,
  DEFAULT_TIMEOUT_MS,
  type GenerateInit,
} from "./client.js";
export { SERVICE_CONFIG } from "./connection.js";
export { IcehouseError } from "./errors.js";
export { type Security } from "./security.js";
export { type Reply, Stream } from "./stream.js";
