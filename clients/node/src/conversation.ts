import { create, fromJson, type JsonValue, type MessageInitShape, toJson } from "@bufbuild/protobuf";

import {
  type ChatMessage,
  ChatMessageSchema,
  type ContentPartSchema,
  ImageDetail,
  type ImagePartSchema,
  Role,
} from "./gen/icehouse/v1/prompt_pb.js";
import type { ToolCall, ToolSchema } from "./gen/icehouse/v1/tool_pb.js";
import { roleNameOf, roleOf } from "./roles.js";

const KIND = "icehouse-conversation";
const VERSION = 1;

/** The part of an answer that goes into the conversation: a GenerateResponse, a Completion or the Reply of a stream. */
export interface Answer {
  readonly text: string;
  readonly reasoning: string;
  readonly toolCalls: readonly ToolCall[];
  readonly tokenIds: readonly number[];
}

/** A function that the model may call: the fields of a Tool. */
export type ToolInit = MessageInitShape<typeof ToolSchema>;

/**
 * An image in a user's turn: a PNG, JPEG, WebP or GIF. Either `data`, the bytes of the file, or `uri`, a data URI or
 * a file or web address that the server is allowed to read.
 */
export type ImageInit = ({ readonly data: Uint8Array } | { readonly uri: string }) & {
  /** Media type, such as "image/png", for the error where the bytes are no image. Default: none. */
  readonly mediaType?: string;
  /** How much of it the model is shown: "low" takes fewer tokens with some models. Default: "auto". */
  readonly detail?: keyof typeof DETAILS;
};

const DETAILS = { auto: ImageDetail.AUTO, low: ImageDetail.LOW, high: ImageDetail.HIGH } as const;

export interface ConversationOptions {
  /** Turns to continue, oldest first. */
  readonly messages?: readonly ChatMessage[];
  readonly system?: string;
  readonly tools?: readonly ToolInit[];
  /** Default: a random one. */
  readonly sessionId?: string;
}

/**
 * The turns so far; use it as a `prompt`. It keeps each answer's tokens, reasoning and tool calls, so each turn
 * starts from the cached blocks of the turn before.
 */
export class Conversation {
  /** The turns, oldest first. */
  readonly messages: ChatMessage[];
  /** Names the conversation in logs, traces and gateways, as the `sessionId` of a request. */
  readonly sessionId: string;
  /**
   * Tools that the model may call, in every request whose prompt names no tools of its own. They come before the
   * turns in the prompt, so nothing is reused after a change. `toJSON` does not keep them.
   */
  tools: readonly ToolInit[];

  constructor({ messages = [], system = "", tools = [], sessionId }: ConversationOptions = {}) {
    this.messages = [...messages];
    this.sessionId = sessionId ?? randomId();
    this.tools = tools;
    if (system) this.system = system;
  }

  /** The system prompt; "" for none. Nothing is reused after a change. */
  get system(): string {
    const [first] = this.messages;
    return first?.role === Role.SYSTEM ? first.content : "";
  }

  set system(text: string) {
    if (this.messages[0]?.role === Role.SYSTEM) this.messages.shift();
    if (text) this.messages.unshift(create(ChatMessageSchema, { role: Role.SYSTEM, content: text }));
  }

  /** Adds a turn of the user; images come before the text. */
  say(text: string, { images = [] }: { readonly images?: readonly ImageInit[] } = {}): void {
    this.messages.push(create(ChatMessageSchema, { role: Role.USER, ...contentOf(text, images) }));
  }

  /** Adds an answer as a turn of the assistant. */
  add({ text, reasoning, toolCalls, tokenIds }: Answer): void {
    const turn = { reasoning, toolCalls: [...toolCalls], tokenIds: [...tokenIds] };
    this.messages.push(create(ChatMessageSchema, { role: Role.ASSISTANT, content: text, ...turn }));
  }

  /** Adds the result of a tool call. */
  answer({ id, name }: ToolCall, content: string): void {
    this.messages.push(create(ChatMessageSchema, { role: Role.TOOL, content, name, toolCallId: id }));
  }

  /** Removes the last turn of the user and everything after it. Does nothing without such a turn. */
  undo(): void {
    const turn = this.messages.map(({ role }) => role).lastIndexOf(Role.USER);
    if (turn >= 0) this.messages.length = turn;
  }

  /** Returns what JSON.stringify writes. The clients of all languages read it. */
  toJSON(): JsonValue {
    return { kind: KIND, version: VERSION, session_id: this.sessionId, messages: this.messages.map(factsOf) };
  }

  /** Reads what JSON.stringify wrote, or a plain list of `{"role", "content"}`. Throws TypeError for anything else. */
  static fromJSON(text: string): Conversation {
    const facts: unknown = JSON.parse(text);
    if (Array.isArray(facts)) return new Conversation({ messages: facts.map(messageFrom) });
    const { kind, version, session_id: sessionId, messages } = (facts ?? {}) as Readonly<Record<string, unknown>>;
    if (kind !== KIND || version !== VERSION) {
      throw new TypeError(`not a conversation: kind ${String(kind)}, version ${String(version)}`);
    }
    if (!Array.isArray(messages)) throw new TypeError("not a conversation: there is no list of messages");
    const named = typeof sessionId === "string" && sessionId !== "" ? { sessionId } : {};
    return new Conversation({ messages: messages.map(messageFrom), ...named });
  }
}

/** Returns the fields of a turn that shows these images, followed by this text. */
export function contentOf(
  text: string,
  images: readonly ImageInit[],
): Pick<MessageInitShape<typeof ChatMessageSchema>, "content" | "parts"> {
  if (images.length === 0) return { content: text };
  const parts: MessageInitShape<typeof ContentPartSchema>[] = images.map((image) => ({
    part: { case: "image", value: imagePartFrom(image) },
  }));
  if (text) parts.push({ part: { case: "text", value: text } });
  return { parts };
}

function imagePartFrom({ mediaType = "", detail, ...image }: ImageInit): MessageInitShape<typeof ImagePartSchema> {
  if (detail !== undefined && !Object.hasOwn(DETAILS, detail)) {
    throw new TypeError(`an image's detail is ${Object.keys(DETAILS).join(", ")}, not ${JSON.stringify(detail)}`);
  }
  const source = "uri" in image ? { case: "uri" as const, value: image.uri } : { case: "data" as const, value: image.data };
  return { source, mediaType, ...(detail === undefined ? {} : { detail: DETAILS[detail] }) };
}

function randomId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Returns a turn as it is kept: its role by name, and its content even if it is empty. */
function factsOf(message: ChatMessage): JsonValue {
  const facts = toJson(ChatMessageSchema, message, { useProtoFieldName: true });
  const { role, role_name, ...kept } = facts as Readonly<Record<string, JsonValue>>;
  return { role: roleNameOf(message), content: "", ...kept };
}

function messageFrom(facts: JsonValue, index: number): ChatMessage {
  const place = `not a conversation: messages[${index}]`;
  let message: ChatMessage;
  try {
    message = fromJson(ChatMessageSchema, withRole(facts));
  } catch (error) {
    throw new TypeError(`${place}: ${error instanceof Error ? error.message : String(error)}`, { cause: error });
  }
  if (!roleNameOf(message)) throw new TypeError(`${place} has no role`);
  return message;
}

/** Returns the facts with their role as the API has it: `user` is the user's, any other name the template's own. */
function withRole(facts: JsonValue): JsonValue {
  if (typeof facts !== "object" || facts === null || Array.isArray(facts)) return facts;
  const { role, ...others } = facts;
  if (typeof role !== "string" || role.startsWith("ROLE_")) return facts;
  return { ...others, ...(roleOf(role) === undefined ? { role_name: role } : { role: roleOf(role)! }) };
}
