import { createHash } from "node:crypto";

import type { GenerateRequest } from "./gen/icehouse/v1/inference_service_pb.js";

/** The header that carries `prefixKey` with every Generate and Stream. */
export const PREFIX_KEY_HEADER = "icehouse-prefix-key";

const TEXT_BYTES = 1024;
const TOKEN_COUNT = 256;
const CHAT_BYTES = 4096;

/**
 * Returns the key by which a load balancer sends prompts with one beginning to one server: 16 hex digits,
 * equal for prompts that begin alike. Every client library makes it the same way:
 *
 *     first 16 hex digits of SHA-256(model ‖ 0x00 ‖ kind ‖ 0x00 ‖ beginning)
 *
 * `kind` is "text", "tokens" or "chat". The beginning is the first 1024 bytes of the text in UTF-8; the
 * first 256 token ids, each as four bytes, little-endian; or of a conversation each message up to and
 * with the first of role "user", as role ‖ 0x00 ‖ content ‖ 0x00, cut after 4096 bytes.
 */
export function prefixKey(request: GenerateRequest): string {
  return createHash("sha256")
    .update(`${request.model}\0${request.prompt.case ?? ""}\0`)
    .update(beginning(request))
    .digest("hex")
    .slice(0, 16);
}

function beginning({ prompt }: GenerateRequest): Buffer {
  switch (prompt.case) {
    case "text":
      return Buffer.from(prompt.value).subarray(0, TEXT_BYTES);
    case "tokens": {
      const ids = prompt.value.ids.slice(0, TOKEN_COUNT);
      const bytes = Buffer.alloc(4 * ids.length);
      ids.forEach((id, index) => bytes.writeInt32LE(id, 4 * index));
      return bytes;
    }
    case "chat": {
      let turns = Buffer.alloc(0);
      for (const { role, content } of prompt.value.messages) {
        turns = Buffer.concat([turns, Buffer.from(`${role}\0${content}\0`)]);
        if (role === "user" || turns.length >= CHAT_BYTES) break;
      }
      return turns.subarray(0, CHAT_BYTES);
    }
    default:
      return Buffer.alloc(0);
  }
}
