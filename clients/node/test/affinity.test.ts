import { fromJson, type JsonValue } from "@bufbuild/protobuf";
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { prefixKey, SERVICE_CONFIG } from "../src/index.js";
import { GenerateRequestSchema } from "../src/gen/icehouse/v1/inference_service_pb.js";

function published(name: string): string {
  return readFileSync(new URL(`../../../${name}`, import.meta.url), "utf8");
}

// The examples are those of all client libraries.
test("the prefix keys are the same in every language", () => {
  const examples = JSON.parse(published("prefix_keys.json")) as { request: JsonValue; key: string }[];
  assert.notEqual(examples.length, 0);
  for (const { request, key } of examples) {
    assert.equal(prefixKey(fromJson(GenerateRequestSchema, request)), key);
  }
});

test("the service config is the published one", () => {
  assert.equal(SERVICE_CONFIG, published("service_config.json"));
});
