/** A scenario of clients/scenarios.json, and the test that runs it; see clients/README.md. */
import { status } from "@grpc/grpc-js";
import assert from "node:assert/strict";
import { appendFileSync, readFileSync } from "node:fs";
import { type TestContext, test } from "node:test";

import type { Client, ClientOptions, IcehouseError } from "../src/index.js";
import { dial, live, servers } from "./servers.js";

/** Values of the file: each scenario knows the types of its own. */
type Values = Readonly<Record<string, any>>;
type Entry = Readonly<{ server: string; input: Values; expect: Values }>;

const RESULTS = process.env["ICEHOUSE_TEST_RESULTS"];
const ENTRIES = JSON.parse(
  readFileSync(new URL("../../../scenarios.json", import.meta.url), "utf8"),
) as Readonly<Record<string, Entry>>;

/** One entry of the file, its server, and a name that no other test has. */
export class Scenario {
  readonly input: Values;
  readonly expect: Values;
  readonly ownName: string;
  readonly #address: string;
  readonly #context: TestContext;

  constructor(name: string, context: TestContext) {
    const entry = ENTRIES[name];
    assert(entry, `there is no scenario ${name}`);
    this.input = entry.input;
    this.expect = entry.expect;
    this.ownName = `node-${name}-${process.pid}`;
    this.#address = String(servers[entry.server]);
    this.#context = context;
  }

  /** Returns a client of the scenario's server, which ends with the test. */
  client(options?: ClientOptions): Client {
    return dial(this.#context, this.#address, options);
  }

  get prompt(): string {
    const { text, text_unit: unit, repeat } = this.input;
    return text ?? unit.repeat(repeat);
  }

  /** A request to generate, under a name of its own. */
  get request(): { readonly prompt: string; readonly maxOutputTokens: number; readonly requestId: string } {
    return { prompt: this.prompt, maxOutputTokens: this.input["max_output_tokens"], requestId: this.ownName };
  }

  /** The prompt, for a tenant whose cache is empty. */
  get unknown(): { readonly prompt: string; readonly cache: { readonly tenant: string } } {
    return { prompt: this.prompt, cache: { tenant: this.ownName } };
  }

  /** Compares what a call was refused with. */
  assertRefused({ code, reason }: IcehouseError, expected: unknown = this.expect["reason"]): void {
    assert.deepEqual([status[code], reason], [this.expect["code"], expected]);
  }
}

/** Runs a scenario as the test of its name, and writes down what it came to. */
export function scenario(name: string, run: (scenario: Scenario) => Promise<void>): void {
  test(name, live, async (t) => {
    const { server = "" } = ENTRIES[name] ?? {};
    if (servers[server] === "") return t.skip("its server could not be started; `make test-clients` says why");
    let passed = false;
    try {
      await run(new Scenario(name, t));
      passed = true;
    } finally {
      if (RESULTS) appendFileSync(RESULTS, `${JSON.stringify({ scenario: name, passed })}\n`);
    }
  });
}
