/** Against a server that refuses as often as it is told; a real one cannot be made to do that. */
import { create, fromBinary, type MessageInitShape, toBinary } from "@bufbuild/protobuf";
import { anyPack, durationFromMs } from "@bufbuild/protobuf/wkt";
import { InterceptingCall, Metadata, Server, ServerCredentials, type ServerWritableStream, status } from "@grpc/grpc-js";
import assert from "node:assert/strict";
import { type TestContext, test } from "node:test";
import { setImmediate } from "node:timers/promises";

import { Client, type ClientOptions, IcehouseError, PREFIX_KEY_HEADER, prefixKey } from "../src/index.js";
import { ErrorInfoSchema, RetryInfoSchema } from "../src/gen/google/rpc/error_details_pb.js";
import { StatusSchema } from "../src/gen/google/rpc/status_pb.js";
import { CacheService, type WarmProgress, WarmResponseSchema } from "../src/gen/icehouse/v1/cache_service_pb.js";
import {
  GenerateRequestSchema,
  GenerateResponseSchema,
  InferenceService,
  StreamResponseSchema,
} from "../src/gen/icehouse/v1/inference_service_pb.js";
import { FinishReason } from "../src/gen/icehouse/v1/usage_pb.js";
import {
  CancelRequestRequestSchema,
  CancelRequestResponseSchema,
  GetServerResponseSchema,
  ServerService,
  ServerState,
} from "../src/gen/icehouse/v1/server_service_pb.js";

type Refusal = Readonly<{ code: status; details: string; metadata?: Metadata }>;

const UNAVAILABLE: Refusal = { code: status.UNAVAILABLE, details: "draining" };

type Event = Exclude<MessageInitShape<typeof StreamResponseSchema>["event"], undefined>;
type WarmEvent = Exclude<MessageInitShape<typeof WarmResponseSchema>["event"], undefined>;

class Scripted {
  refusals: Refusal[] = [];
  generateCount = 0;
  streamCount = 0;
  events: Event[] = [];
  warmEvents: WarmEvent[] = [{ case: "done", value: {} }];
  states: ServerState[] = [];
  headers = new Metadata();
  deadline: Date | number = Infinity;
}

/** Returns a client of a server with this script; both end with the test. */
async function serve(t: TestContext, script: Scripted, options?: ClientOptions): Promise<Client> {
  const server = new Server();
  const take = (call: { metadata: Metadata; getDeadline(): Date | number }): Refusal | undefined => {
    script.headers = call.metadata;
    script.deadline = call.getDeadline();
    return script.refusals.shift();
  };
  const { generate, stream } = InferenceService.method;
  const { warm } = CacheService.method;
  const { getServer, cancelRequest } = ServerService.method;
  const shared = {
    requestDeserialize: (bytes: Buffer) => fromBinary(GenerateRequestSchema, bytes),
    requestSerialize: () => Buffer.alloc(0),
    requestStream: false,
  };
  server.addService(
    {
      generate: {
        ...shared,
        path: `/${generate.parent.typeName}/${generate.name}`,
        responseStream: false,
        responseSerialize: (text: string) =>
          Buffer.from(toBinary(GenerateResponseSchema, create(GenerateResponseSchema, { text }))),
        responseDeserialize: () => undefined,
      },
      warm: {
        ...shared,
        path: `/${warm.parent.typeName}/${warm.name}`,
        responseStream: true,
        responseSerialize: (event: WarmEvent) =>
          Buffer.from(toBinary(WarmResponseSchema, create(WarmResponseSchema, { event }))),
        responseDeserialize: () => undefined,
      },
      stream: {
        ...shared,
        path: `/${stream.parent.typeName}/${stream.name}`,
        responseStream: true,
        responseSerialize: (event: Event) =>
          Buffer.from(toBinary(StreamResponseSchema, create(StreamResponseSchema, { event }))),
        responseDeserialize: () => undefined,
      },
      getServer: {
        ...shared,
        path: `/${getServer.parent.typeName}/${getServer.name}`,
        responseStream: false,
        responseSerialize: (state: ServerState) =>
          Buffer.from(toBinary(GetServerResponseSchema, create(GetServerResponseSchema, { server: { state } }))),
        responseDeserialize: () => undefined,
      },
      cancelRequest: {
        ...shared,
        path: `/${cancelRequest.parent.typeName}/${cancelRequest.name}`,
        requestDeserialize: (bytes: Buffer) => fromBinary(CancelRequestRequestSchema, bytes),
        responseStream: false,
        responseSerialize: (request: { requestId: string; tenant: string }) =>
          Buffer.from(toBinary(CancelRequestResponseSchema, create(CancelRequestResponseSchema, { request }))),
        responseDeserialize: () => undefined,
      },
    },
    {
      generate: (call: Parameters<typeof take>[0], answer: (refusal: Refusal | null, text?: string) => void) => {
        script.generateCount += 1;
        answer(take(call) ?? null, "done");
      },
      warm: (call: Parameters<typeof take>[0] & ServerWritableStream<object, WarmEvent>) => {
        const refusal = take(call);
        if (refusal) return call.emit("error", refusal);
        for (const event of script.warmEvents) call.write(event);
        return call.end();
      },
      stream: (call: Parameters<typeof take>[0] & ServerWritableStream<object, Event>) => {
        script.streamCount += 1;
        const refusal = take(call);
        if (refusal) return call.emit("error", refusal);
        for (const event of script.events) call.write(event);
        return call.end();
      },
      getServer: (
        call: Parameters<typeof take>[0],
        answer: (refusal: Refusal | null, state?: ServerState) => void,
      ) => {
        const refusal = take(call);
        answer(refusal ?? null, refusal ? undefined : script.states.shift());
      },
      cancelRequest: (
        { request }: { request: { requestId: string; tenant?: string } },
        answer: (refusal: null, found: { requestId: string; tenant: string }) => void,
      ) => {
        answer(null, { requestId: request.requestId, tenant: request.tenant ?? "nobody" });
      },
    } as never,
  );
  const port = await new Promise<number>((resolve, reject) => {
    server.bindAsync("127.0.0.1:0", ServerCredentials.createInsecure(), (error, bound) =>
      error ? reject(error) : resolve(bound),
    );
  });
  const client = new Client(`127.0.0.1:${port}`, options);
  t.after(() => {
    client.close();
    server.forceShutdown();
  });
  return client;
}

async function drain(texts: AsyncIterable<unknown>): Promise<void> {
  for await (const _ of texts);
}

const request = { prompt: { form: { case: "text", value: "Once upon a time" } } } as const;

test("Generate is retried while unavailable", async (t) => {
  const script = new Scripted();
  script.refusals = [UNAVAILABLE, UNAVAILABLE];
  const client = await serve(t, script);
  assert.equal((await client.generate(request)).text, "done");
  assert.equal(script.generateCount, 3);
});

test("nothing else is retried", async (t) => {
  const script = new Scripted();
  const client = await serve(t, script);
  script.refusals = [{ code: status.RESOURCE_EXHAUSTED, details: "full" }];
  await assert.rejects(client.generate(request), { code: status.RESOURCE_EXHAUSTED });
  script.refusals = [UNAVAILABLE];
  await assert.rejects(drain(client.stream(request)), { code: status.UNAVAILABLE, reason: "UNAVAILABLE" });
  assert.deepEqual([script.generateCount, script.streamCount], [1, 1]);
});

/** Returns a refusal that says when to come back. */
function notNow(code: status, delayMs: number): Refusal {
  const info = create(ErrorInfoSchema, { reason: "QUEUE_FULL", metadata: { waiting: "8" } });
  const retry = create(RetryInfoSchema, { retryDelay: durationFromMs(delayMs) });
  const details = [anyPack(ErrorInfoSchema, info), anyPack(RetryInfoSchema, retry)];
  const metadata = new Metadata();
  metadata.set("grpc-status-details-bin", Buffer.from(toBinary(StatusSchema, create(StatusSchema, { code, details }))));
  return { code, details: "full", metadata };
}

test("what is refused for now is sent again", async (t) => {
  const script = new Scripted();
  script.refusals = [notNow(status.RESOURCE_EXHAUSTED, 0), notNow(status.RESOURCE_EXHAUSTED, 1)];
  const client = await serve(t, script, { retryLimit: 2 });
  assert.equal((await client.generate(request)).text, "done");
  assert.equal(script.generateCount, 3);
});

test("nothing else is sent again", async (t) => {
  const { RESOURCE_EXHAUSTED: exhausted, INVALID_ARGUMENT: invalid } = status;
  for (const [about, retryLimit, refusal, count] of [
    ["nobody asked for it", undefined, notNow(exhausted, 0), 1],
    ["as often as was asked", 3, notNow(exhausted, 0), 4],
    ["the server does not say when", 3, { code: exhausted, details: "full" }, 1],
    ["it will never do", 3, notNow(invalid, 0), 1],
    ["the deadline comes first", 3, notNow(exhausted, 3_600_000), 1],
  ] as const) {
    const script = new Scripted();
    script.refusals = Array<Refusal>(9).fill(refusal);
    const client = await serve(t, script, retryLimit === undefined ? {} : { retryLimit });
    await assert.rejects(client.generate(request), { code: refusal.code });
    assert.equal(script.generateCount, count, about);
    await assert.rejects(drain(client.stream(request)), { code: refusal.code });
    await assert.rejects(client.cache.warm({ prompt: "Hi" }), { code: refusal.code });
    assert.deepEqual([script.streamCount, script.refusals.length], [1, 9 - count - 2], about);
  }
  assert.throws(() => new Client("127.0.0.1:1", { retryLimit: -1 }), RangeError);
});

test("a signal ends the waiting", async (t) => {
  const script = new Scripted();
  const controller = new AbortController();
  script.refusals = [notNow(status.RESOURCE_EXHAUSTED, 3_600_000)];
  const client = await serve(t, script, { retryLimit: 1, timeoutMs: Infinity });
  const call = client.generate(request, { signal: controller.signal });
  while (script.refusals.length > 0) await setImmediate();
  controller.abort();
  await assert.rejects(call, { code: status.CANCELLED });
});

test("a retry delay is told in the error", async (t) => {
  const script = new Scripted();
  script.refusals = [notNow(status.RESOURCE_EXHAUSTED, 1_500)];
  const client = await serve(t, script);
  await assert.rejects(client.generate(request), (error) => {
    assert(error instanceof IcehouseError);
    assert.deepEqual([error.reason, error.retryAfterMs, error.field], ["QUEUE_FULL", 1500, undefined]);
    assert.equal(error.metadata["waiting"], "8");
    assert.equal(error.message, "RESOURCE_EXHAUSTED (QUEUE_FULL): full");
    return true;
  });
});

test("every call has a deadline unless told otherwise", async (t) => {
  for (const [options, isBounded] of [[undefined, true], [{ timeoutMs: Infinity }, false]] as const) {
    const script = new Scripted();
    const client = await serve(t, script, options);
    await client.generate(request);
    assert.equal(Number(script.deadline) < Infinity, isBounded);
    await drain(client.stream(request));
    assert.equal(Number(script.deadline) < Infinity, isBounded);
    await drain(client.watch(InferenceService.method.stream, request));
    assert.equal(Number(script.deadline), Infinity);
  }
});

test("commands that may take minutes have a deadline of their own", async (t) => {
  for (const [options, minutes] of [
    [undefined, 60],
    [{ timeoutMs: 1_800_000 }, 60],
    [{ commandTimeoutMs: 7_200_000 }, 120],
    [{ timeoutMs: Infinity }, Infinity],
  ] as const) {
    const script = new Scripted();
    const client = await serve(t, script, options);
    for (const onProgress of [undefined, () => undefined]) {
      await client.cache.warm(request, { onProgress });
      assert.equal(Math.round((Number(script.deadline) - Date.now()) / 60_000), minutes);
      await client.cache.warm(request, { onProgress, timeoutMs: 600_000 });
      assert.equal(Math.round((Number(script.deadline) - Date.now()) / 60_000), 10);
    }
  }
});

test("a command reports its progress and returns its result, or says that there was none", async (t) => {
  const script = new Scripted();
  const client = await serve(t, script);
  script.warmEvents = [
    { case: "progress", value: { processedTokens: 256, promptTokens: 300 } },
    { case: "progress", value: { processedTokens: 300, promptTokens: 300 } },
    { case: "done", value: { requestId: "r1" } },
  ];
  const steps: number[] = [];
  const onProgress = ({ processedTokens }: WarmProgress) => steps.push(processedTokens);
  assert.equal((await client.cache.warm(request, { onProgress })).requestId, "r1");
  assert.deepEqual(steps, [256, 300]);
  assert.equal((await client.cache.warm(request)).requestId, "r1");
  script.warmEvents.pop();
  await assert.rejects(client.cache.warm(request), /without a result/);
});

test("the headers go with every call that has a prompt", async (t) => {
  const script = new Scripted();
  const client = await serve(t, script, { security: { token: "secret" } });
  const wanted = [[prefixKey(create(GenerateRequestSchema, request))], ["Bearer secret"]];
  const sent = () => [script.headers.get(PREFIX_KEY_HEADER), script.headers.get("authorization")];
  await client.generate(request);
  assert.deepEqual(sent(), wanted);
  script.headers = new Metadata();
  await drain(client.stream(request));
  assert.deepEqual(sent(), wanted);
  script.headers = new Metadata();
  await client.cache.warm(request);
  assert.deepEqual(sent(), wanted);
});

test("a refused token is asked for anew, and the call made again", async (t) => {
  const refused = { code: status.UNAUTHENTICATED, details: "expired" };
  for (const call of [
    (client: Client) => client.generate(request).then(() => undefined),
    (client: Client) => drain(client.stream(request)),
  ]) {
    const script = new Scripted();
    let count = 0;
    const client = await serve(t, script, { security: { token: async () => `t${++count}` } });
    await Promise.all([call(client), call(client)]);
    assert.deepEqual([script.headers.get("authorization"), count], [["Bearer t1"], 1]);
    script.refusals = [refused];
    await call(client);
    assert.deepEqual([script.headers.get("authorization"), count], [["Bearer t2"], 2]);
    script.refusals = [refused, refused];
    await assert.rejects(call(client), { code: status.UNAUTHENTICATED });
    assert.equal(count, 3);
  }
});

test("a token without a source is refused for good, and a source that fails ends one call", async (t) => {
  const script = new Scripted();
  script.refusals = [{ code: status.UNAUTHENTICATED, details: "expired" }];
  const client = await serve(t, script, { security: { token: "secret" } });
  await assert.rejects(client.generate(request), { code: status.UNAUTHENTICATED });
  assert.equal(script.generateCount, 1);
  const tokens = [() => assert.fail("no file"), () => "t1"];
  const other = await serve(t, script, { security: { token: () => tokens.shift()!() } });
  await assert.rejects(other.generate(request), /no file/);
  assert.equal((await other.generate(request)).text, "done");
});

test("a call has metadata of its own, whose token comes first", async (t) => {
  const script = new Scripted();
  const client = await serve(t, script, { security: { token: "secret" } });
  await client.generate(request, { metadata: { Authorization: "Bearer own", "x-team": "search" } });
  assert.deepEqual(script.headers.get("authorization"), ["Bearer own"]);
  assert.deepEqual(script.headers.get("x-team"), ["search"]);
  await client.generate(request);
  assert.deepEqual([script.headers.get("authorization"), script.headers.get("x-team")], [["Bearer secret"], []]);
});

test("interceptors see every attempt of a call", async (t) => {
  const script = new Scripted();
  script.refusals = [notNow(status.RESOURCE_EXHAUSTED, 0)];
  const seen: string[] = [];
  const client = await serve(t, script, {
    retryLimit: 1,
    interceptors: [
      (options, next) => {
        seen.push(options.method_definition.path);
        return new InterceptingCall(next(options), {
          start: (metadata, listener, begin) => {
            metadata.set("x-trace", `${seen.length}`);
            begin(metadata, listener);
          },
        });
      },
    ],
  });
  await client.generate(request);
  const path = "/icehouse.v1.InferenceService/Generate";
  assert.deepEqual([seen, script.headers.get("x-trace")], [[path, path], ["2"]]);
});

test("a request is cancelled of the tenant that is named", async (t) => {
  const client = await serve(t, new Scripted());
  for (const tenant of ["search", ""]) {
    const found = await client.cancelRequest("r1", { tenant });
    assert.deepEqual([found.requestId, found.tenant], ["r1", tenant]);
  }
  assert.equal((await client.cancelRequest("r1", { timeoutMs: 20_000 })).tenant, "nobody");
  await assert.rejects(client.cancelRequest("r1", { tenat: "search" } as never), /there is no 'tenat'/);
});

test("a stream cut short has no reply", async (t) => {
  const client = await serve(t, new Scripted());
  const stream = client.stream(request);
  await drain(stream);
  assert.throws(() => stream.reply, /has not ended/);
});

test("an answer is added up from its pieces, calls and reasoning too", async (t) => {
  const script = new Scripted();
  const toolCall = (piece: { index: number; id?: string; name?: string; argumentsJson?: string; withdrawn?: boolean }) =>
    ({ case: "delta", value: { toolCall: piece } }) as const;
  script.events = [
    { case: "started", value: { requestId: "r1", promptTokens: 9 } },
    { case: "prefillProgress", value: { processedTokens: 9, promptTokens: 9 } },
    { case: "delta", value: { reasoning: "hm", tokenIds: [1] } },
    { case: "delta", value: { text: "Let me ", tokenIds: [2] } },
    toolCall({ index: 0, id: "c1", name: "weather", argumentsJson: '{"city": ' }),
    toolCall({ index: 1, id: "c2", name: "tides" }),
    toolCall({ index: 0, argumentsJson: '"Oslo"}' }),
    toolCall({ index: 1, withdrawn: true }),
    { case: "delta", value: { text: "see", malformedToolCall: { text: "see", problem: "no JSON" } } },
    { case: "delta", value: { text: "other", completionIndex: 1 } },
    { case: "finished", value: { finishReason: FinishReason.LENGTH, completionIndex: 1 } },
    { case: "finished", value: { finishReason: FinishReason.TOOL_CALLS } },
  ];
  const client = await serve(t, script);
  const stream = client.stream({ prompt: "Rain?", completions: 2 });
  const seen = [];
  for await (const { event } of stream.events()) seen.push(event.case);
  assert.deepEqual(seen, script.events.map((event) => event.case));
  const { text, reasoning, tokenIds, toolCalls, malformedToolCalls, finished, started, completions } = stream.reply;
  assert.deepEqual([text, reasoning, tokenIds], ["Let me see", "hm", [1, 2]]);
  assert.deepEqual(toolCalls.map(({ id, name, argumentsJson }) => [id, name, argumentsJson]), [
    ["c1", "weather", '{"city": "Oslo"}'],
  ]);
  assert.deepEqual(malformedToolCalls.map(({ problem }) => problem), ["no JSON"]);
  assert.deepEqual([finished.finishReason, started.requestId], [FinishReason.TOOL_CALLS, "r1"]);
  assert.deepEqual(completions.map((output) => output.text), ["Let me see", "other"]);
});

test("waiting ends when the model is loaded, and no later than told", async (t) => {
  const script = new Scripted();
  const client = await serve(t, script);
  script.refusals = [UNAVAILABLE];
  script.states = [ServerState.LOADING, ServerState.READY, ServerState.FAILED];
  assert.equal((await client.waitReady()).state, ServerState.READY);
  await assert.rejects(client.waitReady(), { code: status.INTERNAL, reason: "ENGINE_FAILED" });
  await assert.rejects(client.waitReady({ timeoutMs: 0 }), { code: status.DEADLINE_EXCEEDED });
  script.states = Array<ServerState>(99).fill(ServerState.LOADING);
  await assert.rejects(client.waitReady({ timeoutMs: 150 }), {
    message: "DEADLINE_EXCEEDED: the server was not ready in time: it is LOADING",
  });
  await assert.rejects(client.waitReady({ signal: AbortSignal.abort() }), { code: status.CANCELLED });
});
