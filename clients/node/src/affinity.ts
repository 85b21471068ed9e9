import type { Message } from "@bufbuild/protobuf";
import { createHash } from "node:crypto";

import { prefixBytes } from "./prefix.js";

export { PREFIX_KEY_HEADER } from "./prefix.js";

/**
 * Returns the key by which a load balancer sends prompts with the same beginning to the same server: 16 hex digits.
 * It is "" for a request without a prompt that can be cached; Generate, Stream, Explain, Warm, Pin, Unpin, Evict,
 * Export and Rerank have one. Every client library computes it in the same way:
 *
 *     first 16 hex digits of SHA-256(model ‖ 0x00 ‖ kind ‖ 0x00 ‖ variant ‖ beginning)
 *
 * `kind` is "text", "tokens", "chat" or "infill", and "query" for Rerank. `beginning` is
 *
 * - the first 1024 bytes, in UTF-8, of the text, the query or the infill's prefix;
 * - the first 256 token ids, each as four bytes, little-endian;
 * - of a conversation, the messages up to and including the first one of the user, each as
 *   role ‖ 0x00 ‖ content ‖ 0x00, cut after 4096 bytes. The role is its name, such as "user"; the texts of
 *   `parts` are appended to the content.
 *
 * `variant` is empty without an adapter and tools; otherwise it is adapter ‖ 0x00, followed for each tool by
 * name ‖ 0x00 ‖ description ‖ 0x00 ‖ parameters_json ‖ 0x00.
 */
export function prefixKey(request: Message): string {
  const bytes = prefixBytes(request);
  return bytes ? createHash("sha256").update(bytes).digest("hex").slice(0, 16) : "";
}
