/** What clients/scenarios.json does not ask of every language, against real servers. */
import { status } from "@grpc/grpc-js";
import assert from "node:assert/strict";
import { test } from "node:test";

import { Conversation, type PromptInit } from "../src/index.js";
import { ModelService } from "../src/gen/icehouse/v1/model_service_pb.js";
import { Role } from "../src/gen/icehouse/v1/prompt_pb.js";
import { collect, dial, live, refusal, servers } from "./servers.js";

const ENDLESS = { prompt: "Once", maxOutputTokens: 4000 };

test("of several completions the first is the reply", live, async (t) => {
  const client = dial(t, servers.address);
  const request = { prompt: "Once", maxOutputTokens: 8, completions: 2, sampling: { temperature: 1, seed: 7n } };
  const [first, second] = (await client.generate(request)).completions;
  assert(first && second);
  assert.notEqual(first.text, second.text);
  const stream = client.stream(request);
  assert.throws(() => stream.reply, /has not ended/);
  assert.equal((await collect(stream)).join(""), first.text);
  assert.deepEqual([stream.reply.text, stream.reply.tokenIds], [first.text, first.tokenIds]);
  assert.deepEqual(stream.reply.completions.map(({ text }) => text), [first.text, second.text]);
});

test("prompts of every kind", live, async (t) => {
  const client = dial(t, servers.address);
  const prompts: PromptInit[] = [
    "Hi",
    [10, 11, 12],
    [{ role: "system", content: "Be kind." }, { role: "user", content: "Hi" }],
    { form: { case: "chat", value: { messages: [{ role: Role.USER, content: "Hi" }] } } },
  ];
  for (const prompt of prompts) {
    assert.equal((await client.generate({ prompt, maxOutputTokens: 1 })).usage?.outputTokens, 1);
  }
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
  const short = { ...ENDLESS, maxOutputTokens: 1 };
  assert.equal((await refusal(client.generate(short, { signal }))).code, status.CANCELLED);
  assert.equal((await refusal(collect(client.stream(short, { signal })))).code, status.CANCELLED);
});

test("what a progress callback throws ends the command", live, async (t) => {
  const onProgress = () => {
    throw new RangeError("enough");
  };
  const prompt = Array<number>(600).fill(7);
  await assert.rejects(dial(t, servers.address).cache.warm({ prompt }, { onProgress }), RangeError);
});

test("each turn of a conversation starts from the blocks of the one before", live, async (t) => {
  const client = dial(t, servers.address);
  const talk = new Conversation({ system: "Be kind. ".repeat(8) });
  const ask = { prompt: talk, sessionId: talk.sessionId, maxOutputTokens: 4 };
  talk.say("Hi");
  talk.add(await client.generate(ask));
  talk.say("On");
  const stream = client.stream(ask);
  await collect(stream);
  talk.add(stream.reply);
  assert.notEqual(stream.started?.cache?.cachedTokens, 0);
  const { SYSTEM, USER, ASSISTANT } = Role;
  assert.deepEqual(talk.messages.map(({ role }) => role), [SYSTEM, USER, ASSISTANT, USER, ASSISTANT]);
  assert.deepEqual(talk.messages.at(-1)?.tokenIds, stream.reply.tokenIds);
});

test("a server tells its models and counters; what it lacks is refused", live, async (t) => {
  const client = dial(t, servers.address);
  assert.deepEqual((await client.listModels()).map(({ id }) => id), [servers.model]);
  assert((await client.cacheStats()).cache?.ram);
  assert((await client.getStats()).engine);
  const { reason } = await refusal(client.call(ModelService.method.getModel, { model: "none" }));
  assert.equal(reason, "MODEL_NOT_FOUND");
  assert.equal((await refusal(client.cancelRequest("none"))).reason, "REQUEST_NOT_FOUND");
  assert.equal((await refusal(client.cache.pin({ prompt: "unknown" }))).reason, "BLOCK_NOT_FOUND");
  assert.equal((await refusal(client.cache.evictAll({ model: "none" }))).reason, "MODEL_NOT_FOUND");
});
