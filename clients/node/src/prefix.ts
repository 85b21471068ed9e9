import type { Message } from "@bufbuild/protobuf";

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

/** Returns what the key of a request's prompt is the hash of; undefined for one without a prompt that is cached. */
export function prefixBytes(request: Message): Uint8Array<ArrayBuffer> | undefined {
  if (!isKeyed(request)) return undefined;
  const start = beginning(request);
  if (start === undefined) return undefined;
  return joined(encoded(`${request.model}\0${start.kind}\0${variant(request)}`), start.bytes);
}

function isKeyed(request: Message): request is Keyed {
  return request.$typeName in PROMPTED || request.$typeName === "icehouse.v1.RerankRequest";
}

function beginning(request: Keyed): Readonly<{ kind: string; bytes: Uint8Array }> | undefined {
  if (request.$typeName === "icehouse.v1.RerankRequest") return { kind: "query", bytes: firstBytes(request.query) };
  const prompt = request.$typeName === "icehouse.v1.EvictRequest" ? request.target : request.prompt;
  switch (prompt.case) {
    case "text":
      return { kind: "text", bytes: firstBytes(prompt.value) };
    case "tokens": {
      const ids = prompt.value.ids.slice(0, TOKEN_COUNT);
      const bytes = new DataView(new ArrayBuffer(4 * ids.length));
      ids.forEach((id, index) => bytes.setInt32(4 * index, id, true));
      return { kind: "tokens", bytes: new Uint8Array(bytes.buffer) };
    }
    case "infill":
      return { kind: "infill", bytes: firstBytes(prompt.value.prefix) };
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

function turns(chat: ChatPrompt): Uint8Array {
  let bytes = new Uint8Array();
  for (const { role, content, parts } of chat.messages) {
    const text = content + parts.map(({ part }) => (part.case === "text" ? part.value : "")).join("");
    bytes = joined(bytes, encoded(`${role}\0${text}\0`));
    if (role === "user" || bytes.length >= CHAT_BYTES) break;
  }
  return bytes.subarray(0, CHAT_BYTES);
}

function firstBytes(text: string): Uint8Array {
  return encoded(text).subarray(0, TEXT_BYTES);
}

function encoded(text: string): Uint8Array {
  return new TextEncoder().encode(text);
}

function joined(one: Uint8Array, other: Uint8Array): Uint8Array<ArrayBuffer> {
  const both = new Uint8Array(one.length + other.length);
  both.set(one);
  both.set(other, one.length);
  return both;
}
