import type { Message } from "@bufbuild/protobuf";

import type {
  EvictRequest,
  ExplainRequest,
  ExportRequest,
  PinRequest,
  UnpinRequest,
  WarmRequest,
} from "./gen/icehouse/v1/cache_service_pb.js";
import type { GenerateRequest } from "./gen/icehouse/v1/inference_service_pb.js";
import { type ChatPrompt, type Prompt, Role } from "./gen/icehouse/v1/prompt_pb.js";
import type { RerankRequest } from "./gen/icehouse/v1/rerank_service_pb.js";
import { roleNameOf } from "./roles.js";

/** The header that carries `prefixKey` with every call that uses the prefix cache. */
export const PREFIX_KEY_HEADER = "icehouse-prefix-key";

const TEXT_BYTES = 1024;
const TOKEN_COUNT = 256;
const CHAT_BYTES = 4096;

type Prompted =
  | GenerateRequest
  | WarmRequest
  | ExplainRequest
  | PinRequest
  | UnpinRequest
  | EvictRequest
  | ExportRequest;

const PROMPTED: Readonly<Record<Prompted["$typeName"], true>> = {
  "icehouse.v1.GenerateRequest": true,
  "icehouse.v1.WarmRequest": true,
  "icehouse.v1.ExplainRequest": true,
  "icehouse.v1.PinRequest": true,
  "icehouse.v1.UnpinRequest": true,
  "icehouse.v1.EvictRequest": true,
  "icehouse.v1.ExportRequest": true,
};

/** Returns the bytes that the key is the hash of; undefined for a request without a prompt that can be cached. */
export function prefixBytes(request: Message): Uint8Array<ArrayBuffer> | undefined {
  if (isRerank(request)) return bytesOf(request.model, "query", variant(request.adapter), firstBytes(request.query));
  if (!isPrompted(request) || !request.prompt) return undefined;
  const { form, tools, adapter } = request.prompt;
  const start = beginning(form);
  return start && bytesOf(request.model, form.case ?? "", variant(adapter, tools), start);
}

function isRerank(request: Message): request is RerankRequest {
  return request.$typeName === "icehouse.v1.RerankRequest";
}

function isPrompted(request: Message): request is Prompted {
  return request.$typeName in PROMPTED;
}

function bytesOf(model: string, kind: string, variant: string, beginning: Uint8Array): Uint8Array<ArrayBuffer> {
  return joined(encoded(`${model}\0${kind}\0${variant}`), beginning);
}

function variant(adapter: string, tools: Prompt["tools"] = []): string {
  if (adapter === "" && tools.length === 0) return "";
  const texts = tools.map(({ name, description, parametersJson }) => `${name}\0${description}\0${parametersJson}\0`);
  return `${adapter}\0${texts.join("")}`;
}

function beginning(form: Prompt["form"]): Uint8Array | undefined {
  switch (form.case) {
    case "text":
      return firstBytes(form.value);
    case "tokens": {
      const ids = form.value.ids.slice(0, TOKEN_COUNT);
      const bytes = new DataView(new ArrayBuffer(4 * ids.length));
      ids.forEach((id, index) => bytes.setInt32(4 * index, id, true));
      return new Uint8Array(bytes.buffer);
    }
    case "infill":
      return firstBytes(form.value.prefix);
    case "chat":
      return turns(form.value);
    default:
      return undefined;
  }
}

function turns(chat: ChatPrompt): Uint8Array {
  let bytes = new Uint8Array();
  for (const message of chat.messages) {
    const texts = message.parts.map(({ part }) => (part.case === "text" ? part.value : ""));
    bytes = joined(bytes, encoded(`${roleNameOf(message)}\0${message.content}${texts.join("")}\0`));
    if (message.role === Role.USER || bytes.length >= CHAT_BYTES) break;
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
