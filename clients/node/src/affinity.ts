import type { Message } from "@bufbuild/protobuf";
import { createHash } from "node:crypto";

import type {
  EvictRequest,
  ExplainRequest,
  PinRequest,
  UnpinRequest,
  WarmRequest,
} from "./gen/icehouse/v1/cache_service_pb.js";
import type { GenerateRequest } from "./gen/icehouse/v1/inference_service_pb.js";
import type { ChatPrompt } from "./gen/icehouse/v1/prompt_pb.js";
import type { RerankRequest } from "./gen/icehouse/v1/rerank_service_pb.js";
import type { Tool } from "./gen/icehouse/v1/tool_pb.js";

/** The header that carries `prefixKey` with every call whose cache it concerns. */
export const PREFIX_KEY_HEADER = "icehouse-prefix-key";

const TEXT_BYTES = 1024;
const TOKEN_COUNT = 256;
const CHAT_BYTES = 4096;

type Prompted = GenerateRequest | WarmRequest | ExplainRequest | PinRequest | UnpinRequest | EvictRequest;
type Keyed = Prompted | RerankRequest;

const PROMPTED: Readonly<Record<Prompted["$typeName"], true>> = {
  "icehouse.v1.GenerateRequest": true,
  "icehouse.v1.WarmRequest": true,
  "icehouse.v1.ExplainRequest": true,
  "icehouse.v1.PinRequest": true,
  "icehouse.v1.UnpinRequest": true,
  "icehouse.v1.EvictRequest": true,
};

/**
 * Returns the key by which a load balancer sends prompts with one beginning to one server: 16 hex digits,
 * equal for prompts that begin alike. Messages without a prompt that is cached have none, the empty text:
 * those with one are of Generate, Stream, Warm, Explain, Pin, Unpin, Evict and Rerank. Every client library
 * makes it the same way:
 *
 *     first 16 hex digits of SHA-256(model ‖ 0x00 ‖ kind ‖ 0x00 ‖ variant ‖ beginning)
 *
 * `kind` is "text", "tokens", "chat" or, for Rerank, "query". The beginning is the first 1024 bytes of the
 * text or the query in UTF-8; the first 256 token ids, each as four bytes, little-endian; or of a
 * conversation each message up to and with the first of role "user", as role ‖ 0x00 ‖ content ‖ 0x00 with
 * the texts of `parts` joined to the content, cut after 4096 bytes. The variant is what else makes KV
 * another: empty without an adapter and tools, otherwise adapter ‖ 0x00 and of each tool
 * name ‖ 0x00 ‖ description ‖ 0x00 ‖ parameters_json ‖ 0x00.
 */
export function prefixKey(request: Message): string {
  if (!isKeyed(request)) return "";
  const start = beginning(request);
  if (start === undefined) return "";
  return createHash("sha256")
    .update(`${request.model}\0${start.kind}\0${variant(request)}`)
    .update(start.bytes)
    .digest("hex")
    .slice(0, 16);
}

function isKeyed(request: Message): request is Keyed {
  return request.$typeName in PROMPTED || request.$typeName === "icehouse.v1.RerankRequest";
}

function beginning(request: Keyed): Readonly<{ kind: string; bytes: Buffer }> | undefined {
  if (request.$typeName === "icehouse.v1.RerankRequest") return { kind: "query", bytes: firstBytes(request.query) };
  const prompt = request.$typeName === "icehouse.v1.EvictRequest" ? request.target : request.prompt;
  switch (prompt.case) {
    case "text":
      return { kind: "text", bytes: firstBytes(prompt.value) };
    case "tokens": {
      const ids = prompt.value.ids.slice(0, TOKEN_COUNT);
      const bytes = Buffer.alloc(4 * ids.length);
      ids.forEach((id, index) => bytes.writeInt32LE(id, 4 * index));
      return { kind: "tokens", bytes };
    }
    case "chat":
      return { kind: "chat", bytes: turns(prompt.value) };
    default:
      return undefined;
  }
}

function variant(request: Keyed): string {
  const tools: readonly Tool[] = request.$typeName === "icehouse.v1.RerankRequest" ? [] : request.tools;
  if (request.adapter === "" && tools.length === 0) return "";
  const texts = tools.map(({ name, description, parametersJson }) => `${name}\0${description}\0${parametersJson}\0`);
  return `${request.adapter}\0${texts.join("")}`;
}

function turns(chat: ChatPrompt): Buffer {
  let bytes = Buffer.alloc(0);
  for (const { role, content, parts } of chat.messages) {
    const text = content + parts.map(({ part }) => (part.case === "text" ? part.value : "")).join("");
    bytes = Buffer.concat([bytes, Buffer.from(`${role}\0${text}\0`)]);
    if (role === "user" || bytes.length >= CHAT_BYTES) break;
  }
  return bytes.subarray(0, CHAT_BYTES);
}

function firstBytes(text: string): Buffer {
  return Buffer.from(text).subarray(0, TEXT_BYTES);
}
