import type { Message } from "@bufbuild/protobuf";
import { createHash } from "node:crypto";

import { prefixBytes } from "./prefix.js";

export { PREFIX_KEY_HEADER } from "./prefix.js";

/**
 * Returns the key by which a load balancer sends prompts with one beginning to one server: 16 hex digits,
 * equal for prompts that begin alike. Messages without a prompt that is cached have none, the empty text:
 * those with one are of Generate, Stream, Warm, Explain, Pin, Unpin, Evict and Rerank. Every client library
 * makes it the same way:
 *
 *     first 16 hex digits of SHA-256(model ‖ 0x00 ‖ kind ‖ 0x00 ‖ variant ‖ beginning)
 *
 * `kind` is "text", "tokens", "chat", "infill" or, for Rerank, "query". The beginning is the first 1024 bytes
 * of the text, the query or the infill's prefix in UTF-8; the first 256 token ids, each as four bytes,
 * little-endian; or of a conversation each message up to and with the first of role "user", as
 * role ‖ 0x00 ‖ content ‖ 0x00 with the texts of `parts` joined to the content, cut after 4096 bytes. The
 * variant is what else makes KV another: empty without an adapter and tools, otherwise adapter ‖ 0x00 and of
 * each tool name ‖ 0x00 ‖ description ‖ 0x00 ‖ parameters_json ‖ 0x00.
 */
export function prefixKey(request: Message): string {
  const bytes = prefixBytes(request);
  return bytes ? createHash("sha256").update(bytes).digest("hex").slice(0, 16) : "";
}
