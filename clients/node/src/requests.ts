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
import { type ChatMessageSchema, type ChatPromptSchema, PromptSchema, Role } from "./gen/icehouse/v1/prompt_pb.js";
import type { RerankRequestSchema } from "./gen/icehouse/v1/rerank_service_pb.js";
import { refuseUnknownFields } from "./options.js";
import { ROLE_NAMES, type RoleName, roleOf } from "./roles.js";

/** One turn: the fields of a ChatMessage, with `role` by name, and `images` that come before its content. */
export type ChatMessageInit =
  | MessageShape<typeof ChatMessageSchema>
  | (Omit<Fields<typeof ChatMessageSchema>, "role"> & {
      readonly role?: RoleName | Role;
      readonly images?: readonly ImageInit[];
    });

/** A conversation with arguments for its template: the fields of a ChatPrompt. */
export type ChatInit =
  | MessageShape<typeof ChatPromptSchema>
  | (Omit<Fields<typeof ChatPromptSchema>, "messages"> & { readonly messages: readonly ChatMessageInit[] });

/** What to continue: text, token ids, a conversation, or the oneof of the API. */
export type PromptForm =
  | string
  | readonly number[]
  | readonly ChatMessageInit[]
  | Conversation
  | ChatInit
  | Exclude<Fields<typeof PromptSchema>["form"], undefined>;

/** A prompt: what to continue, alone or with tools and an adapter. */
export type PromptInit =
  | PromptForm
  | MessageShape<typeof PromptSchema>
  | (Omit<Fields<typeof PromptSchema>, "form"> & { readonly form: PromptForm });

/** What generate and stream take: the fields of a GenerateRequest. Only the prompt is required. */
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

/** What embed takes: the fields of an EmbedRequest. Each of `inputs` is a text, token ids or the API's own form. */
export type EmbedInit =
  | MessageShape<typeof EmbedRequestSchema>
  | (Omit<Fields<typeof EmbedRequestSchema>, "inputs"> & {
      readonly inputs: readonly (string | readonly number[] | MessageInitShape<typeof EmbedInputSchema>)[];
    });

type Fields<S extends DescMessage> = Exclude<MessageInitShape<S>, MessageShape<S>>;
type PromptedInit<S extends DescMessage> =
  | MessageShape<S>
  | (Omit<Fields<S>, "prompt"> & { readonly prompt: PromptInit });

/** Returns the message; throws TypeError for a key that it has no field for. */
export function requestFrom<S extends DescMessage>(schema: S, init: MessageInitShape<S>): MessageShape<S> {
  refuseUnknownFields(schema, init);
  return create(schema, init);
}

/** As `requestFrom`, for messages with a prompt. */
export function promptedRequestFrom<S extends DescMessage>(schema: S, init: PromptedInit<S>): MessageShape<S> {
  if (isMessage(init, schema)) return init;
  const { prompt } = init as { readonly prompt?: PromptInit };
  const given: unknown = prompt === undefined ? init : { ...init, prompt: promptFrom(prompt) };
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

function promptFrom(prompt: PromptInit): MessageInitShape<typeof PromptSchema> {
  if (isMessage(prompt, PromptSchema)) return prompt;
  if (isForm(prompt)) return { ...toolsOf(prompt), form: formFrom(prompt) };
  const { form, ...others } = prompt;
  // Without a form the server names the field that is missing, and an unknown key is refused here.
  return form === undefined ? others : { ...toolsOf(form), ...others, form: formFrom(form) };
}

function isForm(prompt: PromptInit): prompt is PromptForm {
  if (typeof prompt === "string" || isList(prompt) || prompt instanceof Conversation) return true;
  return "messages" in prompt || "case" in prompt;
}

function toolsOf(form: PromptForm): Pick<MessageInitShape<typeof PromptSchema>, "tools"> {
  return form instanceof Conversation ? { tools: [...form.tools] } : {};
}

function formFrom(form: PromptForm): Exclude<MessageInitShape<typeof PromptSchema>["form"], undefined> {
  if (typeof form === "string") return { case: "text", value: form };
  if (form instanceof Conversation) return { case: "chat", value: { messages: form.messages } };
  if (isList(form)) {
    if (isTokens(form)) return { case: "tokens", value: { ids: [...form] } };
    return { case: "chat", value: { messages: form.map(turnFrom) } };
  }
  if ("case" in form) return form;
  if (isMessage(form)) return { case: "chat", value: form };
  return { case: "chat", value: { ...form, messages: form.messages.map(turnFrom) } };
}

function turnFrom(turn: ChatMessageInit): MessageInitShape<typeof ChatMessageSchema> {
  if (isMessage(turn)) return turn;
  const { role = Role.UNSPECIFIED, images = [], ...fields } = turn;
  if (images.length === 0) return { ...fields, role: roleFrom(role) };
  if (fields.parts?.length) throw new TypeError("a turn has either images or parts");
  return { ...fields, content: "", ...contentOf(fields.content ?? "", images), role: roleFrom(role) };
}

function roleFrom(role: RoleName | Role): Role {
  const found = typeof role === "string" ? roleOf(role) : role;
  if (found !== undefined) return found;
  throw new TypeError(`a role is ${ROLE_NAMES.join(", ")}, not '${role}'; a template's own role goes into 'roleName'`);
}

function isTokens(form: readonly number[] | readonly ChatMessageInit[]): form is readonly number[] {
  return typeof form[0] === "number";
}

function isList<T>(value: T): value is Extract<T, readonly unknown[]> {
  return Array.isArray(value);
}
