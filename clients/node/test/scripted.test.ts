/** Against a server that refuses as often as it is told; a real one cannot be made to do that. */
import { create, fromBinary, type MessageInitShape, toBinary } from "@bufbuild/protobuf";
import { anyPack } from "@bufbuild/protobuf/wkt";
import { Metadata, Server, ServerCredentials, type ServerWritableStream, status } from "@grpc/grpc-js";
import assert from "node:assert/strict";
import { type TestContext, test } from "node:test";

import { Client, type ClientOptions, IcehouseError, PREFIX_KEY_HEADER, prefixKey } from "../src/index.js";
import { ErrorInfoSchema, RetryInfoSchema } from "../src/gen/google/rpc/error_details_pb.js";
import { StatusSchema } from "../src/gen/google/rpc/status_pb.js";
import { CacheService } from "../src/gen/icehouse/v1/cache_service_pb.js";
import {
  GenerateRequestSchema,
  GenerateResponseSchema,
  InferenceService,
  StreamResponseSchema,
} from "../src/gen/icehouse/v1/inference_service_pb.js";
import { FinishReason } from "../src/gen/icehouse/v1/usage_pb.js";
import { GetServerResponseSchema, ServerService, ServerState } from "../src/gen/icehouse/v1/server_service_pb.js";

type Refusal = Readonly<{ code: status; details: string; metadata?: Metadata }>;

const UNAVAILABLE: Refusal = { code: status.UNAVAILABLE, details: "draining" };

type Event = Exclude<MessageInitShape<typeof StreamResponseSchema>["event"], undefined>;

class Scripted {
  refusals: Refusal[] = [];
  generateCount = 0;
  streamCount = 0;
  events: Event[] = [];
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
  const { getServer } = ServerService.method;
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
        responseStream: false,
        responseSerialize: () => Buffer.alloc(0),
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
    },
    {
      generate: (call: Parameters<typeof take>[0], answer: (refusal: Refusal | null, text?: string) => void) => {
        script.generateCount += 1;
        answer(take(call) ?? null, "done");
      },
      warm: (call: Parameters<typeof take>[0], answer: (refusal: Refusal | null, empty?: object) => void) => {
        answer(take(call) ?? null, {});
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

const request = { prompt: { case: "text", value: "Once upon a time" } } as const;

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

test("a retry delay is told in the error", async (t) => {
  const info = create(ErrorInfoSchema, { reason: "QUEUE_FULL", metadata: { waiting: "8" } });
  const retry = create(RetryInfoSchema, { retryDelay: { seconds: 1n, nanos: 500_000_000 } });
  const details = [anyPack(ErrorInfoSchema, info), anyPack(RetryInfoSchema, retry)];
  const metadata = new Metadata();
  const packed = toBinary(StatusSchema, create(StatusSchema, { code: status.RESOURCE_EXHAUSTED, details }));
  metadata.set("grpc-status-details-bin", Buffer.from(packed));
  const script = new Scripted();
  script.refusals = [{ code: status.RESOURCE_EXHAUSTED, details: "full", metadata }];
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

test("orders that may be long have a deadline of their own", async (t) => {
  for (const [options, minutes] of [
    [undefined, 60],
    [{ timeoutMs: 1_800_000 }, 60],
    [{ orderTimeoutMs: 7_200_000 }, 120],
    [{ timeoutMs: Infinity }, Infinity],
  ] as const) {
    const script = new Scripted();
    const client = await serve(t, script, options);
    await client.call(CacheService.method.warm, request);
    assert.equal(Math.round((Number(script.deadline) - Date.now()) / 60_000), minutes);
    await client.call(CacheService.method.warm, request, { timeoutMs: 600_000 });
    assert.equal(Math.round((Number(script.deadline) - Date.now()) / 60_000), 10);
  }
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
  await client.call(CacheService.method.warm, request);
  assert.deepEqual(sent(), wanted);
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
  await assert.rejects(client.waitReady(), /engine has failed/);
  await assert.rejects(client.waitReady({ timeoutMs: 0 }), { code: status.DEADLINE_EXCEEDED });
  await assert.rejects(client.waitReady({ signal: AbortSignal.abort() }), { code: status.CANCELLED });
});
