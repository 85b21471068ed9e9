import { createRegistry, fromJson, type JsonValue } from "@bufbuild/protobuf";
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { prefixKey, SERVICE_CONFIG } from "../src/index.js";
import { file_icehouse_v1_cache_service } from "../src/gen/icehouse/v1/cache_service_pb.js";
import { file_icehouse_v1_inference_service } from "../src/gen/icehouse/v1/inference_service_pb.js";
import { file_icehouse_v1_rerank_service } from "../src/gen/icehouse/v1/rerank_service_pb.js";

function published(name: string): string {
  return readFileSync(new URL(`../../../${name}`, import.meta.url), "utf8");
}

// The examples are those of all client libraries.
test("the prefix keys are the same in every language", () => {
  type Example = { message: string; request: JsonValue; key: string };
  const examples = JSON.parse(published("prefix_keys.json")) as Example[];
  assert.notEqual(examples.length, 0);
  const known = createRegistry(file_icehouse_v1_inference_service, file_icehouse_v1_cache_service, file_icehouse_v1_rerank_service);
  for (const { message, request, key } of examples) {
    const schema = known.getMessage(`icehouse.v1.${message}`);
    assert(schema, message);
    assert.equal(prefixKey(fromJson(schema, request)), key, message);
  }
});

test("the service config is the published one", () => {
  assert.equal(SERVICE_CONFIG, published("service_config.json"));
});
