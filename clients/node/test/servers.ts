/** The servers that tests/system/clients/live_servers.py has started and told in ICEHOUSE_TEST_SERVERS. */
import assert from "node:assert/strict";
import type { TestContext } from "node:test";

import { Client, type ClientOptions, IcehouseError } from "../src/index.js";

export interface Servers {
  readonly model: string;
  readonly address: string;
  readonly tokens_per_minute: number;
  readonly ca_path: string;
  readonly token: string;
  readonly [name: string]: string | number;
}

const told = process.env["ICEHOUSE_TEST_SERVERS"];

export const servers = JSON.parse(told ?? "{}") as Servers;

/** Options of a test that needs them. */
export const live = {
  skip: told ? false : "ICEHOUSE_TEST_SERVERS names no servers; `make test-clients` starts them",
  timeout: 120_000,
};

/** Returns a client that ends with the test. */
export function dial(t: TestContext, address: string, options?: ClientOptions): Client {
  const client = new Client(address, options);
  t.after(() => client.close());
  return client;
}

/** Returns what a call is refused with. */
export async function refusal(call: Promise<unknown>): Promise<IcehouseError> {
  try {
    await call;
  } catch (error) {
    assert(error instanceof IcehouseError, String(error));
    return error;
  }
  return assert.fail("the call was not refused");
}

/** Returns all that an iteration yields. */
export async function collect<T>(items: AsyncIterable<T>): Promise<T[]> {
  const found = [];
  for await (const item of items) found.push(item);
  return found;
}
