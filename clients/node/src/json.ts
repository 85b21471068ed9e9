import { type GenerateResponse } from "./gen/icehouse/v1/inference_service_pb.js";
import { FinishReason } from "./gen/icehouse/v1/usage_pb.js";

/** Reads a value and throws at what it does not know: a schema of zod, or any other object with a `parse`. */
export interface Parser<T> {
  parse(value: unknown): T;
}

/** What a parser is that knows its own JSON schema (Standard JSON Schema, of zod 4.2 and others). */
interface SelfDescribing {
  readonly "~standard"?: {
    readonly jsonSchema?: { input(options: { readonly target: string }): Readonly<Record<string, unknown>> };
  };
}

/** Returns the JSON schema of what a parser takes; throws TypeError for one that does not tell. */
export function jsonSchemaOf(parser: Parser<unknown> & SelfDescribing): string {
  const { jsonSchema } = parser["~standard"] ?? {};
  if (!jsonSchema) {
    throw new TypeError("the parser does not tell its JSON schema; give the request a responseFormat, as z.toJSONSchema makes it");
  }
  return JSON.stringify(jsonSchema.input({ target: "draft-2020-12" }));
}

/** Returns the value of an output in JSON; throws for one that a limit cut, and what the parser throws. */
export function jsonOf<T>({ text, finishReason }: GenerateResponse, parser: Parser<T>): T {
  if (finishReason !== FinishReason.STOP_TOKEN) {
    throw new Error(`the output ended with ${FinishReason[finishReason]} before it was complete`);
  }
  return parser.parse(JSON.parse(text));
}
