/** Each scenario of clients/scenarios.json with this client. */
import { timestampMs } from "@bufbuild/protobuf/wkt";
import { status } from "@grpc/grpc-js";
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

import { type Client, Conversation } from "../src/index.js";
import { CacheTier } from "../src/gen/icehouse/v1/cache_service_pb.js";
import { ServerFeature, ServerState } from "../src/gen/icehouse/v1/server_service_pb.js";
import { ToolChoiceMode } from "../src/gen/icehouse/v1/tool_pb.js";
import { FinishReason } from "../src/gen/icehouse/v1/usage_pb.js";
import { type Scenario, scenario } from "./scenario.js";
import { collect, refusal, servers } from "./servers.js";

scenario("unary", async (s) => {
  const { usage, finishReason, model, tokenIds } = await s.client().generate(s.request);
  assert.deepEqual([usage?.outputTokens, tokenIds.length], [s.expect["output_tokens"], s.expect["output_tokens"]]);
  assert.deepEqual([FinishReason[finishReason], model], [s.expect["finish_reason"], servers.model]);
});

scenario("stream", async (s) => {
  const client = s.client();
  const whole = await client.generate(s.request);
  const stream = client.stream(s.request);
  assert.equal((await collect(stream)).join(""), whole.text);
  const { text, tokenIds, finished } = stream.reply;
  assert.deepEqual([text, tokenIds], [whole.text, whole.tokenIds]);
  assert.equal(finished.usage?.outputTokens, s.expect["output_tokens"]);
  assert.equal(FinishReason[finished.finishReason], s.expect["finish_reason"]);
});

scenario("cancel", async (s) => {
  const client = s.client();
  const isListed = async () => (await client.listRequests()).some(({ requestId }) => requestId === s.ownName);
  for await (const _ of client.stream(s.request)) {
    assert(await isListed());
    break;
  }
  while (await isListed());
});

scenario("deadline", async (s) => {
  const stream = s.client().stream(s.request, { timeoutMs: s.input["timeout_ms"] });
  assert.equal(status[(await refusal(collect(stream))).code], s.expect["code"]);
});

scenario("cancelled_by_id", async (s) => {
  const client = s.client();
  const read = async () => {
    for await (const { event } of client.stream(s.request).events()) {
      if (event.case !== "started") continue;
      const listed = (await client.listRequests()).find(({ requestId }) => requestId === s.ownName);
      assert(listed);
      const { requestId, method } = await client.cancelRequest(s.ownName);
      assert.deepEqual([requestId, method], [s.ownName, s.expect["method"]]);
    }
  };
  s.assertRefused(await refusal(read()));
});

scenario("invalid_argument", async (s) => {
  const client = s.client();
  for (const call of [() => client.generate(s.request), () => collect(client.stream(s.request))]) {
    const error = await refusal(call());
    s.assertRefused(error);
    assert.deepEqual([error.field, error.retryAfterMs], [s.expect["field"], undefined]);
  }
});

scenario("not_found", async (s) => {
  const error = await refusal(s.client().generate({ prompt: s.prompt, model: s.input["model"] }));
  s.assertRefused(error);
  assert.equal(error.metadata[s.expect["metadata_key"]], servers.model);
});

scenario("already_exists", async (s) => {
  const client = s.client();
  for await (const { event } of client.stream(s.request).events()) {
    assert.equal(event.case, "started");
    s.assertRefused(await refusal(client.generate(s.request)));
    break;
  }
});

scenario("id_of_two_tenants", async (s) => {
  const client = s.client();
  const ofTenant = (tenant: string) => ({ ...s.request, cache: { tenant: `${s.ownName}-${tenant}` } });
  for await (const { event } of client.stream(ofTenant("1")).events()) {
    assert.equal(event.case, "started");
    const maxOutputTokens = s.input["other_max_output_tokens"];
    const { requestId, usage } = await client.generate({ ...ofTenant("2"), maxOutputTokens });
    assert.deepEqual([requestId, usage?.outputTokens], [s.ownName, s.expect["output_tokens"]]);
    break;
  }
});

scenario("unauthenticated", async (s) => {
  const ca = readFileSync(servers.ca_path);
  const missing = s.client({ security: { ca } });
  s.assertRefused(await refusal(missing.generate(s.request)), s.expect["missing_reason"]);
  const unknown = s.client({ security: { ca, token: s.input["unknown_token"] } });
  s.assertRefused(await refusal(unknown.generate(s.request)), s.expect["unknown_reason"]);
});

scenario("permission_denied", async (s) => {
  const client = s.client({ security: { ca: readFileSync(servers.ca_path), token: servers.token } });
  s.assertRefused(await refusal(client.generate({ ...s.request, cache: { tenant: s.input["tenant"] } })));
});

scenario("resource_exhausted", async (s) => {
  const client = s.client();
  const request = { ...s.unknown, maxOutputTokens: servers.tokens_per_minute };
  await client.generate(request);
  const error = await refusal(client.generate(request));
  s.assertRefused(error);
  const { retryAfterMs } = error;
  assert(retryAfterMs && retryAfterMs > 0 && retryAfterMs <= 1000 * s.expect["retry_after_limit_s"], `${retryAfterMs}`);
});

scenario("unavailable", async (s) => {
  s.assertRefused(await refusal(collect(s.client().stream(s.request))));
});

scenario("wait_ready", async (s) => {
  await assertReady(s, s.client());
});

scenario("wait_ready_coming", async (s) => {
  const client = s.client();
  s.assertRefused(await refusal(collect(client.stream(s.request))));
  await assertReady(s, client);
});

scenario("wait_ready_absent", assertLate);

scenario("wait_ready_loading", assertLate);

async function assertReady(s: Scenario, client: Client): Promise<void> {
  const { state } = await client.waitReady({ timeoutMs: s.input["timeout_ms"] });
  assert.equal(ServerState[state], s.expect["state"]);
}

async function assertLate(s: Scenario): Promise<void> {
  const error = await refusal(s.client().waitReady({ timeoutMs: s.input["timeout_ms"] }));
  s.assertRefused(error);
  assert(error.message.includes(s.expect["message_part"]), error.message);
  assert.deepEqual([error.metadata, error.field, error.retryAfterMs], [{}, undefined, undefined]);
}

scenario("retry_on_drain", async (s) => {
  const client = s.client();
  assert.equal((await client.generate(s.request)).usage?.outputTokens, s.expect["output_tokens"]);
  s.assertRefused(await refusal(collect(client.stream(s.request))));
});

scenario("retry_limit", async (s) => {
  const { retry_limit: retryLimit } = s.input;
  const client = s.client({ retryLimit });
  assert.equal((await client.generate(s.request)).usage?.outputTokens, s.expect["output_tokens"]);
  s.assertRefused(await refusal(collect(client.stream(s.request))));
  const again = { ...s.request, requestId: `${s.ownName}-again` };
  const error = await refusal(s.client({ retryLimit: retryLimit - 1 }).generate(again));
  s.assertRefused(error);
  assert(error.retryAfterMs);
});

scenario("tools_loop", async (s) => {
  const client = s.client();
  const { name, description, parameters } = s.input["tool"];
  const talk = new Conversation({ tools: [{ name, description, parametersJson: JSON.stringify(parameters) }] });
  talk.say(s.input["question"]);
  const request = { prompt: talk, cache: { tenant: s.ownName } };
  const { text, reasoning, toolCalls, finishReason, tokenIds, usage } = await client.generate(request);
  assert.deepEqual([text, reasoning], [s.expect["text"], s.expect["reasoning"]]);
  assert.equal(FinishReason[finishReason], s.expect["finish_reason"]);
  const [call] = toolCalls;
  assert(call && usage);
  assert.equal(call.name, name);
  assert.deepEqual(JSON.parse(call.argumentsJson), s.expect["arguments"]);
  const stream = client.stream(request);
  await collect(stream);
  const { reply } = stream;
  assert.deepEqual([reply.text, reply.reasoning, reply.tokenIds], [text, reasoning, tokenIds]);
  assert.deepEqual(reply.toolCalls.map(({ argumentsJson }) => argumentsJson), [call.argumentsJson]);
  talk.add(reply);
  for (const asked of reply.toolCalls) talk.answer(asked, s.input["result"]);
  const { usage: following } = await client.generate({ ...request, toolChoice: { mode: ToolChoiceMode.NONE } });
  assert(following);
  const known = usage.promptTokens + usage.outputTokens;
  assert(following.promptTokens > known);
  assert(following.cachedTokens > known - s.expect["uncached_known_tokens_limit"], `${following.cachedTokens} of ${known}`);
});

scenario("reasoning_budget", async (s) => {
  const client = s.client();
  const talk = new Conversation();
  talk.say(s.input["question"]);
  const request = { prompt: talk, maxOutputTokens: s.input["max_output_tokens"] };
  const { text, reasoning, usage } = await client.generate(request);
  assert.deepEqual([text, reasoning], [s.expect["text"], s.expect["reasoning"]]);
  assert.equal(usage?.reasoningTokens, s.expect["reasoning_tokens"]);
  const closed = await client.generate({ ...request, maxReasoningTokens: s.input["max_reasoning_tokens"] });
  assert(closed.text.startsWith(text), closed.text);
  assert.deepEqual([closed.reasoning, closed.usage?.reasoningTokens], ["", s.expect["closed_reasoning_tokens"]]);
});

scenario("infill", async (s) => {
  const client = s.client();
  const prompt = { case: "infill", value: { prefix: s.input["prefix"], suffix: s.input["suffix"] } } as const;
  const answer = await client.generate({ prompt, maxOutputTokens: s.input["max_output_tokens"] });
  assert.deepEqual([answer.text, FinishReason[answer.finishReason]], [s.expect["text"], s.expect["finish_reason"]]);
  assert.equal(answer.stopTokenId, answer.tokenIds.at(-1));
  assert.equal((await client.tokenize({ prompt })).tokenCount, answer.usage?.promptTokens);
});

scenario("images", async (s) => {
  const client = s.client();
  const ask = (image: string) => client.generate({ ...shown(s, image), cache: { tenant: s.ownName } });
  const answers = [await ask("image"), await ask("image"), await ask("other_image")] as const;
  for (const { usage } of answers) assert.equal(usage?.imageTokens, s.expect["image_tokens"]);
  const [first, again, other] = answers;
  assert.equal(first.usage?.cachedTokens, s.expect["first_cached_tokens"]);
  assert.deepEqual(again.tokenIds, first.tokenIds);
  const { promptTokens = 0, ramTokens = 0 } = again.usage ?? {};
  assert(promptTokens - ramTokens <= s.expect["uncached_tokens_limit"], `${ramTokens} of ${promptTokens}`);
  assert((other.usage?.cachedTokens ?? 0) < s.expect["other_cached_tokens_limit"], `${other.usage?.cachedTokens}`);
});

scenario("broken_image", async (s) => {
  const error = await refusal(s.client().generate(shown(s)));
  s.assertRefused(error);
  assert.equal(error.field, s.expect["field"]);
});

scenario("images_unsupported", async (s) => {
  const error = await refusal(s.client().generate(shown(s)));
  s.assertRefused(error);
  assert.equal(error.field, s.expect["field"]);
  assert(error.message.includes(s.expect["message_part"]), error.message);
  assert(error.metadata[s.expect["metadata_key"]], JSON.stringify(error.metadata));
});

function shown({ input }: Scenario, image = "image") {
  const images = [{ data: Buffer.from(input[image], "base64"), mediaType: String(input["media_type"]) }];
  const prompt = [{ role: "user" as const, content: String(input["question"]), images }];
  return { prompt, maxOutputTokens: Number(input["max_output_tokens"]) };
}

scenario("structured_output", async (s) => {
  const format = { case: "jsonSchema", value: JSON.stringify(s.input["schema"]) } as const;
  const client = s.client();
  const request = { ...s.request, responseFormat: { format, compact: true } };
  assert.equal((await client.generate(request)).text, s.expect["text"]);
  const { city, inhabitants } = await client.generateJson(request, { parse: cityOf });
  assert.deepEqual([city, inhabitants], [s.expect["city"], s.expect["inhabitants"]]);
});

scenario("unicode", async (s) => {
  const client = s.client();
  const format = { case: "choice" as const, value: { texts: [String(s.input["choice"])] } };
  const request = { ...s.request, responseFormat: { format } };
  assert.equal((await client.generate(request)).text, s.expect["text"]);
  const pieces = await collect(client.stream(request));
  assert.equal(pieces.join(""), s.expect["text"]);
  assert.deepEqual(pieces.filter((piece) => Buffer.from(piece).toString() !== piece || piece.includes("\uFFFD")), []);
  const { tokens } = await client.tokenize({ prompt: s.prompt });
  assert.equal((await client.detokenize({ tokenIds: tokens.map(({ id }) => id) })).text, s.prompt);
});

scenario("hundred_streams", async (s) => {
  const client = s.client();
  const { prompt, maxOutputTokens } = s.request;
  const { text } = await client.generate({ prompt, maxOutputTokens });
  const streams = Array.from({ length: s.input["stream_count"] }, () => client.stream({ prompt, maxOutputTokens }));
  await Promise.all(streams.map(collect));
  for (const { reply } of streams) {
    assert.deepEqual([reply.text, reply.finished.usage?.outputTokens], [text, s.expect["output_tokens"]]);
  }
});

scenario("cache_report", async (s) => {
  const client = s.client();
  const request = { ...s.unknown, maxOutputTokens: s.input["max_output_tokens"] };
  assert.equal((await client.generate(request)).cache?.cachedTokens, s.expect["first_cached_tokens"]);
  const stream = client.stream(request);
  const events = await collect(stream.events());
  assert.equal(events[0]?.event.case, "started");
  const { promptTokens, cache } = stream.reply.started;
  assert(cache && promptTokens - cache.ramTokens <= s.expect["uncached_tokens_limit"], `${cache?.ramTokens}`);
});

scenario("warm", async (s) => {
  const progress: [number, number][] = [];
  const { usage } = await s.client().cache.warm(s.unknown, {
    onProgress: ({ processedTokens, promptTokens }) => progress.push([processedTokens, promptTokens]),
  });
  assert(usage);
  assert.equal(usage.outputTokens, s.expect["output_tokens"]);
  const [processedTokens = 0, promptTokens] = progress.at(-1) ?? [];
  assert.equal(promptTokens, usage.promptTokens);
  assert(usage.promptTokens - processedTokens <= s.expect["unprocessed_tokens_limit"], `${processedTokens}`);
});

scenario("explain", async (s) => {
  const { cache } = s.client();
  assert.equal((await cache.explain(s.unknown)).cache?.cachedTokens, s.expect["first_cached_tokens"]);
  await cache.warm(s.unknown);
  const { promptTokens, cache: report, blocks } = await cache.explain(s.unknown);
  assert(report && promptTokens - report.ramTokens <= s.expect["uncached_tokens_limit"], `${report?.ramTokens}`);
  assert(blocks.every(({ tier }) => tier === CacheTier.RAM));
  assert.equal(sum(blocks.map(({ tokenCount }) => tokenCount)), report.ramTokens);
});

scenario("pin", async (s) => {
  const { cache } = s.client();
  await cache.warm(s.unknown);
  const ttl = { seconds: BigInt(s.input["ttl_s"]) };
  const { blockCount, tokenCount } = await cache.pin({ ...s.unknown, ttl });
  const { blocks } = await cache.explain(s.unknown);
  assert(blockCount > 0);
  assert.deepEqual(blocks.map(({ pinned }) => pinned), Array(blockCount).fill(true));
  assert.equal(tokenCount, sum(blocks.map((block) => block.tokenCount)));
});

scenario("unpin", async (s) => {
  const { cache } = s.client();
  await cache.warm(s.unknown);
  const { blockCount } = await cache.pin(s.unknown);
  assert.equal((await cache.unpin(s.unknown)).blockCount, blockCount);
  const { blocks } = await cache.explain(s.unknown);
  assert.deepEqual(blocks.map(({ pinned }) => pinned), Array(blockCount).fill(false));
});

scenario("evict", async (s) => {
  const { cache } = s.client();
  await cache.warm(s.unknown);
  const { blocks } = await cache.explain(s.unknown);
  const steps: bigint[] = [];
  const { ramBlockCount } = await cache.evict(s.unknown, { onProgress: (step) => steps.push(step.processedBlockCount) });
  assert.deepEqual([ramBlockCount, steps[0], steps.at(-1)], [BigInt(blocks.length), 0n, ramBlockCount]);
  assert.equal((await cache.explain(s.unknown)).cache?.cachedTokens, s.expect["cached_tokens"]);
});

scenario("verify", async (s) => {
  const steps: bigint[] = [];
  const { verifiedBlockCount, damagedBlockCount } = await s.client().cache.verify({}, {
    onProgress: (step) => steps.push(step.verifiedBlockCount),
  });
  assert.deepEqual([damagedBlockCount, steps.at(-1)], [BigInt(s.expect["damaged_block_count"]), verifiedBlockCount]);
});

scenario("watch_stats", async (s) => {
  const times: number[] = [];
  for await (const { collectTime } of s.client().watchStats({ intervalMs: s.input["interval_ms"] })) {
    assert(collectTime);
    times.push(timestampMs(collectTime));
    if (times.length === s.input["answer_count"]) break;
  }
  assert.equal(new Set(times).size, s.input["answer_count"]);
});

scenario("embed", async (s) => {
  const { texts: inputs, dimensions } = s.input;
  const { embeddings, promptTokens } = await s.client().embed({ inputs, dimensions });
  const sizes = embeddings.map(({ values }) => values.length);
  assert.deepEqual(sizes, Array(s.expect["vector_count"]).fill(s.expect["vector_size"]));
  assert.equal(promptTokens, sum(embeddings.map((embedding) => embedding.promptTokens)));
  assert(promptTokens > 0);
});

scenario("rerank", async (s) => {
  const { query, documents, template, positive_answer: positiveAnswer, negative_answer: negativeAnswer } = s.input;
  const form = { case: "text", value: template } as const;
  const answer = await s.client().rerank({ query, documents, form, positiveAnswer, negativeAnswer });
  assert.deepEqual(answer.results.map(({ index }) => index).sort(), s.expect["indexes"]);
  const scores = answer.results.map(({ score }) => score);
  assert.deepEqual(scores, [...scores].sort((one, other) => other - one));
  assert(answer.promptTokens > 0);
});

scenario("get_server", async (s) => {
  const client = s.client();
  await client.waitReady();
  const { version, state, features, limits } = await client.getServer();
  assert(version && limits && limits.maxOutputTokens > 0);
  assert.equal(ServerState[state], s.expect["state"]);
  assert(features.map((feature) => ServerFeature[feature]).includes(s.expect["feature"]));
});

scenario("token_refresh", async (s) => {
  const ca = readFileSync(servers.ca_path);
  const { unknown_token: unknown } = s.input;
  const { output_tokens: outputTokens, source_call_count: callCount } = s.expect;
  const dialed = (tokens: readonly string[]) => {
    let count = 0;
    const token = () => tokens[Math.min(count++, tokens.length - 1)]!;
    return { client: s.client({ security: { ca, token } }), asked: () => count };
  };
  const one = dialed([unknown, servers.token]);
  for (let turn = 0; turn < 2; turn++) {
    assert.equal((await one.client.generate(s.request)).usage?.outputTokens, outputTokens);
    assert.equal(one.asked(), callCount);
  }
  const other = dialed([unknown, servers.token]);
  const stream = other.client.stream(s.request);
  await collect(stream);
  assert.deepEqual([stream.reply.tokenIds.length, other.asked()], [outputTokens, callCount]);
  const stranger = dialed([unknown]);
  s.assertRefused(await refusal(stranger.client.generate(s.request)));
  assert.equal(stranger.asked(), callCount);
});

scenario("call_metadata", async (s) => {
  const client = s.client({ security: { ca: readFileSync(servers.ca_path) } });
  const metadata = { authorization: `Bearer ${servers.token}` };
  assert.equal((await client.generate(s.request, { metadata })).usage?.outputTokens, s.expect["output_tokens"]);
  await collect(client.stream(s.request, { metadata }));
  s.assertRefused(await refusal(client.generate(s.request)));
});

scenario("tls_and_token", async (s) => {
  const { token } = servers;
  const trusting = s.client({ security: { ca: readFileSync(servers.ca_path), token } });
  assert.equal((await trusting.generate(s.request)).usage?.outputTokens, s.expect["output_tokens"]);
  const untrusting = s.client({ security: { tls: true, token } });
  assert.equal(status[(await refusal(untrusting.generate(s.request))).code], s.expect["untrusted_code"]);
});

interface City {
  readonly city: string;
  readonly inhabitants: number;
}

function cityOf(value: unknown): City {
  const { city, inhabitants } = value as City;
  assert.deepEqual([typeof city, typeof inhabitants], ["string", "number"]);
  return { city, inhabitants };
}

function sum(counts: readonly number[]): number {
  return counts.reduce((total, count) => total + count, 0);
}
