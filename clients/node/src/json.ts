import { type GenerateResponse } from "./gen/icehouse/v1/inference_service_pb.js";
import { FinishReason } from "./gen/icehouse/v1/usage_pb.js";

/** Returns a value with its type, or throws: a schema of zod, or any other object with a `parse`. */
export interface Parser<T> {
  parse(value: unknown): T;
}

/** A parser that has its own JSON schema (Standard JSON Schema; zod since 4.2). */
interface SelfDescribing {
  readonly "~standard"?: {
    readonly jsonSchema?: { input(options: { readonly target: string }): Readonly<Record<string, unknown>> };
  };
}

/** Returns the JSON schema of a parser; throws TypeError if it has none. */
export function jsonSchemaOf(parser: Parser<unknown> & SelfDescribing): string {
  const { jsonSchema } = parser["~standard"] ?? {};
  if (!jsonSchema) {
    throw new TypeError("the parser has no JSON schema; give the request a responseFormat, such as one from z.toJSONSchema");
  }
  return JSON.stringify(jsonSchema.input({ target: "draft-2020-12" }));
}

/** Returns the value of an output in JSON. Throws if a limit cut it, and what the parser throws. */
export function jsonOf<T>({ text, finishReason }: GenerateResponse, parser: Parser<T>): T {
  if (finishReason !== FinishReason.STOP_TOKEN) {
    throw new Error(`the output ended with ${FinishReason[finishReason]} before it was complete`);
  }
  return parser.parse(JSON.parse(text));
}
