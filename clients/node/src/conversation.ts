import { create, fromJson, type JsonValue, type MessageInitShape, toJson } from "@bufbuild/protobuf";

import { type ChatMessage, ChatMessageSchema, type ContentPartSchema, ImageDetail, type ImagePartSchema } from "./gen/icehouse/v1/prompt_pb.js";
import type { ToolCall, ToolSchema } from "./gen/icehouse/v1/tool_pb.js";

const KIND = "icehouse-conversation";
const VERSION = 1;

/** What of an answer goes into the next turn: a GenerateResponse, a Completion or the Reply of a stream. */
export interface Answer {
  readonly text: string;
  readonly reasoning: string;
  readonly toolCalls: readonly ToolCall[];
  readonly tokenIds: readonly number[];
}

/** A function that the model may ask for: the fields of a Tool. */
export type ToolInit = MessageInitShape<typeof ToolSchema>;

/**
 * A picture in a user's turn: `data` as it is in its file, PNG, JPEG, WebP or GIF, or a `uri`, which is a data URI or
 * names a file or a host that the server may read.
 */
export type ImageInit = ({ readonly data: Uint8Array } | { readonly uri: string }) & {
  /** What it must be, such as "image/png"; absent: whatever its bytes say. */
  readonly mediaType?: string;
  /** How much of it the model is shown: "low" takes fewer tokens, with the models that can. Absent: "auto". */
  readonly detail?: keyof typeof DETAILS;
};

const DETAILS = { auto: ImageDetail.AUTO, low: ImageDetail.LOW, high: ImageDetail.HIGH } as const;

export interface ConversationOptions {
  readonly messages?: readonly ChatMessage[];
  readonly system?: string;
  /** What the model may ask for. */
  readonly tools?: readonly ToolInit[];
  /** Absent: one is made. */
  readonly sessionId?: string;
}

/**
 * The turns so far, each answer with its tokens, reasoning and tool calls, so that each turn starts from the
 * cached blocks of the one before. It is a prompt.
 */
export class Conversation {
  /** Oldest first. */
  readonly messages: ChatMessage[];
  /** Names it to gateways, logs and traces, as the `sessionId` of a request. */
  readonly sessionId: string;
  /**
   * What the model may ask for, in each request that names no tools of its own. They stand before the turns, so other
   * tools mean that nothing is reused. Not kept by toJSON.
   */
  tools: readonly ToolInit[];

  constructor({ messages = [], system = "", tools = [], sessionId }: ConversationOptions = {}) {
    this.messages = [...messages];
    this.sessionId = sessionId ?? randomId();
    this.tools = tools;
    if (system) this.system = system;
  }

  /** The system prompt, empty for none. Another one means that nothing behind it is reused. */
  get system(): string {
    const [first] = this.messages;
    return first?.role === "system" ? first.content : "";
  }

  set system(text: string) {
    if (this.messages[0]?.role === "system") this.messages.shift();
    if (text) this.messages.unshift(create(ChatMessageSchema, { role: "system", content: text }));
  }

  /** Adds the user's turn; images stand before its text. */
  say(text: string, { images = [] }: { readonly images?: readonly ImageInit[] } = {}): void {
    this.messages.push(create(ChatMessageSchema, { role: "user", ...contentOf(text, images) }));
  }

  /** Adds the assistant's turn, an answer as it came. */
  add({ text, reasoning, toolCalls, tokenIds }: Answer): void {
    const turn = { reasoning, toolCalls: [...toolCalls], tokenIds: [...tokenIds] };
    this.messages.push(create(ChatMessageSchema, { role: "assistant", content: text, ...turn }));
  }

  /** Adds the result of a call that the assistant asked for. */
  answer({ id, name }: ToolCall, content: string): void {
    this.messages.push(create(ChatMessageSchema, { role: "tool", content, name, toolCallId: id }));
  }

  /** Takes back the last turn of the user and all that came after it; nothing where there is none. */
  undo(): void {
    const turn = this.messages.map(({ role }) => role).lastIndexOf("user");
    if (turn >= 0) this.messages.length = turn;
  }

  /** What JSON.stringify writes of it, to be kept; clients of every language read it. */
  toJSON(): JsonValue {
    const messages = this.messages.map((message) => {
      const facts = toJson(ChatMessageSchema, message, { useProtoFieldName: true });
      return { content: "", ...(facts as Readonly<Record<string, JsonValue>>) };
    });
    return { kind: KIND, version: VERSION, session_id: this.sessionId, messages };
  }

  /** Returns the conversation in a text that was kept, or in a plain list of {"role", "content"}. */
  static fromJSON(text: string): Conversation {
    const facts: unknown = JSON.parse(text);
    if (Array.isArray(facts)) return new Conversation({ messages: facts.map(messageFrom) });
    const { kind, version, session_id: sessionId, messages } = (facts ?? {}) as Readonly<Record<string, unknown>>;
    if (kind !== KIND || version !== VERSION) {
      throw new TypeError(`no conversation: it is of kind ${String(kind)}, version ${String(version)}`);
    }
    if (!Array.isArray(messages)) throw new TypeError("no conversation: there is no list of messages");
    const named = typeof sessionId === "string" && sessionId !== "" ? { sessionId } : {};
    return new Conversation({ messages: messages.map(messageFrom), ...named });
  }
}

/** Returns the fields of a turn that shows these images and then this text. */
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

function messageFrom(facts: JsonValue, index: number): ChatMessage {
  const place = `no conversation: messages[${index}]`;
  let message: ChatMessage;
  try {
    message = fromJson(ChatMessageSchema, facts);
  } catch (error) {
    throw new TypeError(`${place}: ${error instanceof Error ? error.message : String(error)}`, { cause: error });
  }
  if (!message.role) throw new TypeError(`${place} has no role`);
  return message;
}
