/** Proxies of the environment: asked for servers elsewhere, never for one on this machine. */
import { Server, ServerCredentials } from "@grpc/grpc-js";
import assert from "node:assert/strict";
import { createServer } from "node:http";
import { type AddressInfo } from "node:net";
import { type TestContext, test } from "node:test";

import { isLocal } from "../src/local.js";
import { dial, refusal } from "./servers.js";

const VARIABLES = ["grpc_proxy", "https_proxy", "http_proxy", "all_proxy"];

/** Names a proxy in the environment that refuses everybody, and returns what it was asked for. */
async function proxied(t: TestContext, variable: string): Promise<string[]> {
  const asked: string[] = [];
  const proxy = createServer().on("connect", (request, socket) => {
    asked.push(request.url ?? "");
    socket.end("HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n");
  });
  await new Promise<void>((resolve) => proxy.listen(0, "127.0.0.1", resolve));
  const before = { ...process.env };
  for (const name of [...VARIABLES, "no_grpc_proxy", "no_proxy"]) delete process.env[name];
  process.env[variable] = `http://127.0.0.1:${(proxy.address() as AddressInfo).port}`;
  t.after(() => {
    Object.assign(process.env, before);
    if (!(variable in before)) delete process.env[variable];
    proxy.close();
  });
  return asked;
}

/** Returns the port of a server that answers every call with UNIMPLEMENTED. */
async function served(t: TestContext): Promise<number> {
  const server = new Server();
  t.after(() => server.forceShutdown());
  return new Promise((resolve, reject) =>
    server.bindAsync("127.0.0.1:0", ServerCredentials.createInsecure(), (error, port) =>
      error ? reject(error) : resolve(port),
    ),
  );
}

for (const variable of VARIABLES) {
  test(`a server on this machine is asked itself beside ${variable}`, { timeout: 60_000 }, async (t) => {
    const asked = await proxied(t, variable);
    const port = await served(t);
    for (const host of ["127.0.0.1", "localhost", "dns:///localhost", "ipv4:127.0.0.1"]) {
      const refused = await refusal(dial(t, `${host}:${port}`).generate({ prompt: "Hi" }));
      assert.equal(refused.reason, "UNIMPLEMENTED");
    }
    assert.deepEqual(asked, []);
  });
}

for (const variable of VARIABLES.slice(0, 3)) {
  test(`one elsewhere is asked through the proxy of ${variable}`, { timeout: 60_000 }, async (t) => {
    const asked = await proxied(t, variable);
    const refused = await refusal(dial(t, "icehouse.invalid:50051").generate({ prompt: "Hi" }));
    assert.equal(refused.reason, "UNAVAILABLE");
    assert.equal(asked[0], "icehouse.invalid:50051");
  });
}

test("which targets are of this machine", () => {
  for (const target of [
    ...["localhost", "localhost:1", "LocalHost:1", "localhost.:1", "a.localhost:1", "127.0.0.1", "127.9.9.9:1"],
    ...["::1", "[::1]", "[::1]:1", "[::1%lo]:1", "[::ffff:127.0.0.1]:1", "0.0.0.0:1", "[::]:1", "dns:localhost:1"],
    ...["dns://8.8.8.8/localhost:1", "ipv4:127.0.0.1:1,127.0.0.2:1", "ipv6:[::1]:1", "ipv6:%5B::1%5D:1"],
    ...["unix:/a", "unix:///a", "unix:a", "unix-abstract:a"],
  ]) {
    assert(isLocal(target), target);
  }
  for (const target of [
    ...["icehouse:1", "localhost.example:1", "notlocalhost:1", "127.0.0.1.example:1", "128.0.0.1:1", "[::2]:1", ":1"],
    ...["ipv4:127.0.0.1:1,10.0.0.1:1", "xds:///localhost", "10.0.0.1", "dns:///icehouse:1", "[fe80::1]:1", "[", "%:1"],
  ]) {
    assert(!isLocal(target), target);
  }
});
