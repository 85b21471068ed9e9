import { create, type DescMessage, isMessage, type MessageInitShape, type MessageShape } from "@bufbuild/protobuf";

import { contentOf, Conversation, type ImageInit } from "./conversation.js";
import type {
  EvictRequestSchema,
  ExplainRequestSchema,
  PinRequestSchema,
  UnpinRequestSchema,
  VerifyRequestSchema,
  WarmRequestSchema,
} from "./gen/icehouse/v1/cache_service_pb.js";
import { type EmbedInputSchema, EmbedRequestSchema } from "./gen/icehouse/v1/embedding_service_pb.js";
import type {
  DetokenizeRequestSchema,
  GenerateRequestSchema,
  TokenizeRequestSchema,
} from "./gen/icehouse/v1/inference_service_pb.js";
import type { ChatMessageSchema, ChatPromptSchema } from "./gen/icehouse/v1/prompt_pb.js";
import type { RerankRequestSchema } from "./gen/icehouse/v1/rerank_service_pb.js";
import { refuseUnknownFields } from "./options.js";

/** One turn: the fields of a ChatMessage, and in the user's `images` that stand before its content. */
export type ChatMessageInit =
  | MessageShape<typeof ChatMessageSchema>
  | (Fields<typeof ChatMessageSchema> & { readonly images?: readonly ImageInit[] });

/** A conversation with what its template is given: the fields of a ChatPrompt. */
export type ChatInit =
  | MessageShape<typeof ChatPromptSchema>
  | (Omit<Fields<typeof ChatPromptSchema>, "messages"> & { readonly messages?: readonly ChatMessageInit[] });

/** A prompt: text, token ids, a conversation in one of three forms, or the oneof of the API itself. */
export type Prompt =
  | string
  | readonly number[]
  | readonly ChatMessageInit[]
  | Conversation
  | ChatInit
  | Exclude<Fields<typeof GenerateRequestSchema>["prompt"], undefined>;

/** What generate and stream take: the fields of a GenerateRequest, all but `prompt` optional. */
export type GenerateInit = PromptedInit<typeof GenerateRequestSchema>;
export type TokenizeInit = PromptedInit<typeof TokenizeRequestSchema>;
export type DetokenizeInit = MessageInitShape<typeof DetokenizeRequestSchema>;
export type RerankInit = MessageInitShape<typeof RerankRequestSchema>;
export type WarmInit = PromptedInit<typeof WarmRequestSchema>;
export type ExplainInit = PromptedInit<typeof ExplainRequestSchema>;
export type PinInit = PromptedInit<typeof PinRequestSchema>;
export type UnpinInit = PromptedInit<typeof UnpinRequestSchema>;
export type EvictInit = PromptedInit<typeof EvictRequestSchema>;
export type VerifyInit = MessageInitShape<typeof VerifyRequestSchema>;

/** What embed takes: the fields of an EmbedRequest, each of `inputs` a text, token ids or the API's own form. */
export type EmbedInit =
  | MessageShape<typeof EmbedRequestSchema>
  | (Omit<Fields<typeof EmbedRequestSchema>, "inputs"> & {
      readonly inputs: readonly (string | readonly number[] | MessageInitShape<typeof EmbedInputSchema>)[];
    });

type Fields<S extends DescMessage> = Exclude<MessageInitShape<S>, MessageShape<S>>;
type PromptedInit<S extends DescMessage> =
  | MessageShape<S>
  | (Omit<Fields<S>, "prompt" | "target"> & { readonly prompt: Prompt });

/** Returns the message; throws TypeError for a key that it has no field for. */
export function requestFrom<S extends DescMessage>(schema: S, init: MessageInitShape<S>): MessageShape<S> {
  refuseUnknownFields(schema, init);
  return create(schema, init);
}

/** As `requestFrom`, for messages with a prompt. */
export function promptedRequestFrom<S extends DescMessage>(schema: S, init: PromptedInit<S>): MessageShape<S> {
  if (isMessage(init, schema)) return init;
  const { prompt, ...fields } = init as { readonly prompt?: Prompt };
  // Of Evict it is called the target.
  const [{ localName } = { localName: "prompt" }] = schema.oneofs;
  const given = prompt === undefined ? fields : { ...toolsOf(prompt), ...fields, [localName]: promptFrom(prompt) };
  return requestFrom(schema, given as MessageInitShape<S>);
}

/** As `requestFrom`, for Embed. */
export function embedRequestFrom(init: EmbedInit): MessageShape<typeof EmbedRequestSchema> {
  if (isMessage(init, EmbedRequestSchema)) return init;
  const inputs = init.inputs.map((input): MessageInitShape<typeof EmbedInputSchema> => {
    if (typeof input === "string") return { input: { case: "text", value: input } };
    return isList(input) ? { input: { case: "tokens", value: { ids: [...input] } } } : input;
  });
  return requestFrom(EmbedRequestSchema, { ...init, inputs });
}

/** Returns the tools that a conversation brings; each message with a prompt has a field for them. */
function toolsOf(prompt: Prompt): object {
  return prompt instanceof Conversation && prompt.tools.length > 0 ? { tools: prompt.tools } : {};
}

function promptFrom(prompt: Prompt): unknown {
  if (typeof prompt === "string") return { case: "text", value: prompt };
  if (prompt instanceof Conversation) return { case: "chat", value: { messages: prompt.messages } };
  if (isList(prompt)) {
    if (typeof prompt[0] === "number") return { case: "tokens", value: { ids: prompt } };
    return { case: "chat", value: { messages: (prompt as readonly ChatMessageInit[]).map(turnFrom) } };
  }
  if ("case" in prompt) return prompt;
  const { messages } = prompt;
  if (isMessage(prompt) || messages === undefined) return { case: "chat", value: prompt };
  return { case: "chat", value: { ...prompt, messages: messages.map(turnFrom) } };
}

function turnFrom(turn: ChatMessageInit): MessageInitShape<typeof ChatMessageSchema> {
  if (isMessage(turn) || !("images" in turn)) return turn;
  const { images = [], content = "", ...fields } = turn;
  if (images.length > 0 && fields.parts?.length) throw new TypeError("a turn has either images or parts");
  return { ...fields, ...contentOf(content, images) };
}

function isList<T>(value: T): value is Extract<T, readonly unknown[]> {
  return Array.isArray(value);
}
