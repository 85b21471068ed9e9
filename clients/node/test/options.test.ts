/** What a request is made of: prompts in short forms, and keys that no message has. */
import assert from "node:assert/strict";
import { type TestContext, test } from "node:test";

import { Client, Conversation, type GenerateInit, type PromptInit, prefixKey } from "../src/index.js";
import { GenerateRequestSchema, TokenizeRequestSchema } from "../src/gen/icehouse/v1/inference_service_pb.js";
import { EvictRequestSchema } from "../src/gen/icehouse/v1/cache_service_pb.js";
import { Role } from "../src/gen/icehouse/v1/prompt_pb.js";
import { embedRequestFrom, promptedRequestFrom } from "../src/requests.js";

function clientOf(t: TestContext): Client {
  const client = new Client("127.0.0.1:1");
  t.after(() => client.close());
  return client;
}

test("an unknown key is refused with the one that may be meant", async (t) => {
  const client = clientOf(t);
  const prompt = "Hi";
  for (const [request, problem] of [
    [{ prompt, temprature: 1 }, "GenerateRequest: there is no 'temprature'; did you mean 'sampling.temperature'?"],
    [{ prompt, max_tokens: 1 }, "GenerateRequest: there is no 'max_tokens'; did you mean 'maxOutputTokens'?"],
    [{ prompt, max_output_tokens: 1 }, "GenerateRequest: there is no 'max_output_tokens'; did you mean 'maxOutputTokens'?"],
    [{ prompt, n: 2 }, "GenerateRequest: there is no 'n'; did you mean 'completions'?"],
    [{ messages: [] }, "GenerateRequest: there is no 'messages'; did you mean 'prompt'?"],
    [{ prompt, tools: [] }, "GenerateRequest: there is no 'tools'; did you mean 'prompt.tools'?"],
    [{ prompt, functions: [] }, "GenerateRequest: there is no 'functions'; did you mean 'prompt.tools'?"],
    [{ prompt: { form: prompt, adaptor: "sql" } }, "Prompt: there is no 'adaptor'; did you mean 'adapter'?"],
    [{ prompt: { text: "Hi" } }, "Prompt: there is no 'text'; there are form, tools, adapter"],
    [{ prompt, sampling: { topp: 1 } }, "SamplingParams: there is no 'topp'; did you mean 'topP'?"],
    [{ prompt: [{ role: "user", contents: "Hi" }] }, "ChatMessage: there is no 'contents'; did you mean 'content'?"],
    [{ prompt, responseFormat: { format: { case: "jsonSchem", value: "{}" } } }, /oneof format: there is no 'jsonSchem'; did you mean 'jsonSchema'/],
    [{ prompt, cache: { zebra: 1 } }, "CachePolicy: there is no 'zebra'; there are use, tenant, sharedPrefixName"],
  ] as const) {
    const wanted = { name: "TypeError", message: problem };
    await assert.rejects(client.generate(request as unknown as GenerateInit), wanted);
    assert.throws(() => client.stream(request as unknown as GenerateInit), wanted);
  }
  await assert.rejects(client.generate({ prompt }, { timeout: 1 } as never), /did you mean 'timeoutMs'/);
  await assert.rejects(client.cache.evictAll({ onProgres: () => undefined } as never), /there is no 'onProgres'/);
  await assert.rejects(client.rerank({ query: "q", documents: [], topN: 1 } as never), /did you mean 'topCount'/);
  assert.throws(() => new Client("127.0.0.1:1", { timeout: 1 } as never), /did you mean 'timeoutMs'/);
});

test("a template's arguments are the caller's own", () => {
  const chat: PromptInit = { messages: [{ role: "user" }], templateArguments: { enable_thinking: false } };
  const { prompt } = promptedRequestFrom(GenerateRequestSchema, { prompt: chat });
  assert(prompt?.form.case === "chat");
  assert.deepEqual(prompt.form.value.templateArguments, { enable_thinking: false });
});

test("images come before the text; a turn has either images or parts", () => {
  const images = [{ data: Buffer.from("GIF8") }];
  const turn = { role: "user" as const, parts: [{ part: { case: "text" as const, value: "Hi" } }] };
  const ask = (prompt: PromptInit) => promptedRequestFrom(GenerateRequestSchema, { prompt });
  assert.throws(() => ask([{ ...turn, images }]), { name: "TypeError", message: /either images or parts/ });
  assert.deepEqual(ask([{ ...turn, images: [] }]), ask([turn]));
  const { prompt } = ask([{ role: "user", content: "Hi", images }]);
  assert(prompt?.form.case === "chat");
  const [{ content, parts } = assert.fail("no turn")] = prompt.form.value.messages;
  assert.deepEqual([content, parts.map(({ part }) => part.case)], ["", ["image", "text"]]);
});

test("a role is said by its name; a template's own has a field", async (t) => {
  const { prompt } = promptedRequestFrom(GenerateRequestSchema, {
    prompt: [{ role: "developer" }, { role: Role.TOOL }, { roleName: "ipython" }],
  });
  assert(prompt?.form.case === "chat");
  const roles = prompt.form.value.messages.map(({ role, roleName }) => [role, roleName]);
  assert.deepEqual(roles, [[Role.DEVELOPER, ""], [Role.TOOL, ""], [Role.UNSPECIFIED, "ipython"]]);
  const wrong = [{ role: "ipython" as never }];
  await assert.rejects(clientOf(t).generate({ prompt: wrong }), { name: "TypeError", message: /roleName/ });
});

test("a conversation brings its tools to every prompt that names none", () => {
  const talk = new Conversation({ tools: [{ name: "get_weather", parametersJson: "{}" }] });
  talk.say("Is it raining?");
  for (const [{ prompt }, wanted] of [
    [promptedRequestFrom(GenerateRequestSchema, { prompt: talk }), ["get_weather"]],
    [promptedRequestFrom(EvictRequestSchema, { prompt: talk }), ["get_weather"]],
    [promptedRequestFrom(TokenizeRequestSchema, { prompt: { form: talk, adapter: "sql" } }), ["get_weather"]],
    [promptedRequestFrom(GenerateRequestSchema, { prompt: { form: talk, tools: [{ name: "get_time" }] } }), ["get_time"]],
    [promptedRequestFrom(GenerateRequestSchema, { prompt: { form: talk, tools: [] } }), []],
  ] as const) {
    assert.deepEqual(prompt?.tools.map(({ name }) => name), wanted);
  }
});

test("an address is not empty", () => {
  for (const address of ["", " "]) {
    assert.throws(() => new Client(address), { name: "TypeError", message: /must be host:port/ });
  }
});

test("a prompt has short forms", () => {
  const talk = new Conversation();
  talk.say("Hi");
  const messages = [{ role: Role.USER, content: "Hi" }];
  const chat = { case: "chat" as const, value: { messages } };
  const cases: [PromptInit, PromptInit][] = [
    ["Hi", { form: { case: "text", value: "Hi" } }],
    [[1, 2], { form: { case: "tokens", value: { ids: [1, 2] } } }],
    [[{ role: "user", content: "Hi" }], { form: chat }],
    [{ messages: [{ role: "user", content: "Hi" }] }, { form: chat }],
    [chat, { form: chat }],
    [talk, { form: chat }],
    [{ form: talk, adapter: "sql" }, { form: chat, adapter: "sql" }],
  ];
  for (const [short, long] of cases) {
    const [one, other] = [short, long].map((prompt) => promptedRequestFrom(GenerateRequestSchema, { prompt }));
    assert(one?.prompt);
    assert.deepEqual(one, other);
    assert.equal(promptedRequestFrom(GenerateRequestSchema, one), one);
    const evict = promptedRequestFrom(EvictRequestSchema, { prompt: one.prompt });
    assert.equal(evict.prompt, one.prompt);
    assert.equal(prefixKey(evict), prefixKey(one));
  }
  assert.equal(promptedRequestFrom(GenerateRequestSchema, {} as GenerateInit).prompt, undefined);
});

test("an input of Embed is a text or token ids", () => {
  const { inputs } = embedRequestFrom({ inputs: ["one", [1, 2], { input: { case: "text", value: "three" } }] });
  assert.deepEqual(inputs.map(({ input }) => input.case), ["text", "tokens", "text"]);
});
