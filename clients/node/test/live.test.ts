/** Against the servers that tests/system/clients/live_servers.py has started and told in ICEHOUSE_TEST_SERVERS. */
import { status } from "@grpc/grpc-js";
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createServer, type AddressInfo } from "node:net";
import { type TestContext, test } from "node:test";

import { Client, type ClientOptions, type GenerateInit, IcehouseError } from "../src/index.js";
import { CacheService } from "../src/gen/icehouse/v1/cache_service_pb.js";
import { InferenceService } from "../src/gen/icehouse/v1/inference_service_pb.js";
import { ModelService } from "../src/gen/icehouse/v1/model_service_pb.js";
import { FinishReason } from "../src/gen/icehouse/v1/usage_pb.js";

interface Servers {
  readonly model: string;
  readonly address: string;
  readonly limited_address: string;
  readonly tokens_per_minute: number;
  readonly secured_address: string;
  readonly ca_path: string;
  readonly token: string;
}

const told = process.env["ICEHOUSE_TEST_SERVERS"];
const servers = JSON.parse(told ?? "{}") as Servers;
const live = { skip: told ? false : "ICEHOUSE_TEST_SERVERS names no servers; `make test-clients` starts them" };

const ENDLESS = { prompt: { case: "text", value: "Once" }, maxOutputTokens: 4000 } as const;
const SHORT = { prompt: { case: "text", value: "Hi" }, maxOutputTokens: 1 } as const;

function dial(t: TestContext, address: string, options?: ClientOptions): Client {
  const client = new Client(address, options);
  t.after(() => client.close());
  return client;
}

async function refusal(call: Promise<unknown>): Promise<IcehouseError> {
  try {
    await call;
  } catch (error) {
    assert(error instanceof IcehouseError, String(error));
    return error;
  }
  return assert.fail("the call was not refused");
}

async function collect(texts: AsyncIterable<string>): Promise<string[]> {
  const pieces = [];
  for await (const piece of texts) pieces.push(piece);
  return pieces;
}

test("stream gives what generate gives", live, async (t) => {
  const client = dial(t, servers.address);
  const request = { prompt: { case: "text", value: "Once upon a time" }, maxOutputTokens: 8 } as const;
  const whole = await client.generate(request);
  const stream = client.stream(request);
  assert.throws(() => stream.reply, /has not ended/);
  assert.equal((await collect(stream)).join(""), whole.text);
  const { text, tokenIds, started, finished } = stream.reply;
  assert.deepEqual([text, tokenIds], [whole.text, whole.tokenIds]);
  assert.deepEqual([tokenIds.length, started.model], [8, servers.model]);
  assert.equal(finished.finishReason, FinishReason.LENGTH);
});

test("of several completions the first is the reply", live, async (t) => {
  const client = dial(t, servers.address);
  const sampling = { temperature: 1, seed: 7n };
  const request = { prompt: { case: "text", value: "Once" }, maxOutputTokens: 8, completions: 2, sampling } as const;
  const [first, second] = (await client.generate(request)).completions;
  assert(first && second);
  assert.notEqual(first.text, second.text);
  const stream = client.stream(request);
  assert.equal((await collect(stream)).join(""), first.text);
  assert.deepEqual([stream.reply.text, stream.reply.tokenIds], [first.text, first.tokenIds]);
});

test("prompts of every kind", live, async (t) => {
  const client = dial(t, servers.address);
  const messages = [{ role: "system", content: "Be kind." }, { role: "user", content: "Hi" }];
  const requests: GenerateInit[] = [
    { prompt: { case: "text", value: "Hi" } },
    { prompt: { case: "tokens", value: { ids: [10, 11, 12] } } },
    { prompt: { case: "chat", value: { messages } } },
  ];
  for (const request of requests) {
    assert.equal((await client.generate({ ...request, maxOutputTokens: 1 })).usage?.outputTokens, 1);
  }
});

test("a refusal says what is wrong", live, async (t) => {
  const client = dial(t, servers.address);
  const wrong = { prompt: { case: "text", value: "Hi" }, maxOutputTokens: -1 } as const;
  for (const call of [() => client.generate(wrong), () => collect(client.stream(wrong))]) {
    const { code, reason, field, metadata, retryAfterMs } = await refusal(call());
    assert.deepEqual([code, reason], [status.INVALID_ARGUMENT, "PARAMETER_OUT_OF_RANGE"]);
    assert.deepEqual([field, retryAfterMs], ["max_output_tokens", undefined]);
    assert.notDeepEqual(metadata, {});
  }
});

test("who used up its tokens is told when to come back", live, async (t) => {
  const client = dial(t, servers.limited_address);
  const request = {
    prompt: { case: "text", value: "Once" },
    maxOutputTokens: servers.tokens_per_minute,
    cache: { tenant: `node-${process.pid}` },
  } as const;
  await client.generate(request);
  const { code, reason, retryAfterMs } = await refusal(client.generate(request));
  assert.deepEqual([code, reason], [status.RESOURCE_EXHAUSTED, "TOKEN_RATE_EXCEEDED"]);
  assert(retryAfterMs && retryAfterMs > 0 && retryAfterMs <= 120_000, `${retryAfterMs}`);
});

test("leaving a stream ends it on the server", { ...live, timeout: 30_000 }, async (t) => {
  const client = dial(t, servers.address);
  const cancelled = async () => (await client.call(InferenceService.method.cacheStats, {})).engine?.cancelledTotal;
  const before = await cancelled();
  for await (const _ of client.stream(ENDLESS)) break;
  while ((await cancelled()) === before);
});

test("a deadline ends a stream", live, async (t) => {
  const client = dial(t, servers.address, { timeoutMs: 200 });
  assert.equal((await refusal(collect(client.stream(ENDLESS)))).code, status.DEADLINE_EXCEEDED);
});

test("a signal ends calls of both kinds, before they begin too", live, async (t) => {
  const client = dial(t, servers.address);
  const controller = new AbortController();
  const { signal } = controller;
  const streaming = (async () => {
    for await (const _ of client.stream(ENDLESS, { signal })) controller.abort();
  })();
  const both = [streaming, client.generate(ENDLESS, { signal })];
  const codes = (await Promise.all(both.map(refusal))).map(({ code }) => code);
  assert.deepEqual(codes, [status.CANCELLED, status.CANCELLED]);
  assert.equal((await refusal(client.generate(SHORT, { signal }))).code, status.CANCELLED);
  assert.equal((await refusal(collect(client.stream(SHORT, { signal })))).code, status.CANCELLED);
});

test("a secured server wants its authority and a token", live, async (t) => {
  const ca = readFileSync(servers.ca_path);
  const { token } = servers;
  await dial(t, servers.secured_address, { security: { ca, token } }).generate(SHORT);
  for (const [security, reason] of [
    [{ ca }, "CREDENTIALS_MISSING"],
    [{ ca, token: "wrong" }, "CREDENTIALS_INVALID"],
    [{ tls: true, token }, "UNAVAILABLE"],
  ] as const) {
    const client = dial(t, servers.secured_address, { security });
    assert.equal((await refusal(client.generate(SHORT))).reason, reason);
  }
});

test("the other services are there too", live, async (t) => {
  const client = dial(t, servers.address);
  const { models } = await client.call(ModelService.method.listModels, {});
  assert.deepEqual(models.map(({ id }) => id), [servers.model]);
  await client.call(CacheService.method.explain, { prompt: { case: "text", value: "Hi" } });
  const { reason } = await refusal(client.call(ModelService.method.getModel, { model: "none" }));
  assert.equal(reason, "MODEL_NOT_FOUND");
  for await (const { stats } of client.watch(CacheService.method.watchStats, { interval: { seconds: 1n } })) {
    assert(stats?.engine);
    break;
  }
});

test("no server is an error too", async (t) => {
  const unused = createServer().listen(0, "127.0.0.1");
  await new Promise((resolve) => unused.once("listening", resolve));
  const { port } = unused.address() as AddressInfo;
  await new Promise((resolve) => unused.close(resolve));
  const { code, reason } = await refusal(dial(t, `127.0.0.1:${port}`).generate(SHORT));
  assert.deepEqual([code, reason], [status.UNAVAILABLE, "UNAVAILABLE"]);
});
