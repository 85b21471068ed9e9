/** Outputs in JSON that are read by a parser: what it tells of its schema, and what is refused. */
import { create } from "@bufbuild/protobuf";
import assert from "node:assert/strict";
import { test } from "node:test";

import { GenerateResponseSchema } from "../src/gen/icehouse/v1/inference_service_pb.js";
import { FinishReason } from "../src/gen/icehouse/v1/usage_pb.js";
import { jsonOf, jsonSchemaOf } from "../src/json.js";

/** As zod's schemas are. */
const COUNT = {
  "~standard": { jsonSchema: { input: ({ target }: { readonly target: string }) => ({ type: "integer", target }) } },
  parse(value: unknown): number {
    assert(typeof value === "number", "no number");
    return value;
  },
};

function response(text: string, finishReason = FinishReason.STOP_TOKEN) {
  return create(GenerateResponseSchema, { text, finishReason });
}

test("a parser tells the JSON schema of what it takes", () => {
  assert.equal(jsonSchemaOf(COUNT), '{"type":"integer","target":"draft-2020-12"}');
  assert.throws(() => jsonSchemaOf({ parse: Number }), /give the request a responseFormat/);
});

test("an output is what the parser makes of it, unless a limit cut it", () => {
  assert.equal(jsonOf(response("7"), COUNT), 7);
  assert.throws(() => jsonOf(response('"7"'), COUNT), /no number/);
  assert.throws(() => jsonOf(response("7", FinishReason.LENGTH), COUNT), /LENGTH/);
});
