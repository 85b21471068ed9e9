import type { Interceptor } from "@grpc/grpc-js";

import { BASE_OPTION_NAMES, BaseClient, type BaseClientOptions } from "./base_client.js";
import { Connection } from "./connection.js";
import { refuseUnknownOptions } from "./options.js";
import type { Security } from "./security.js";
import { BearerToken } from "./token.js";

export interface ClientOptions extends BaseClientOptions {
  /** Default: no TLS, no token. */
  readonly security?: Security;
  /** Interceptors of gRPC, for example for tracing. They see every attempt of a call. */
  readonly interceptors?: readonly Interceptor[];
}

/**
 * A client of one server, or of all servers that a name resolves to. Every method throws IcehouseError, and TypeError
 * for an unknown field or option.
 */
export class Client extends BaseClient {
  /** `address` is "host:port", "unix:/path" or any other gRPC target. It connects with the first call. */
  constructor(address = "localhost:50051", options: ClientOptions = {}) {
    refuseUnknownOptions(options, [...BASE_OPTION_NAMES, "security", "interceptors"]);
    if (!address.trim()) {
      throw new TypeError(
        `the address is ${JSON.stringify(address)}; it must be host:port, such as localhost:50051, or unix:/path`,
      );
    }
    const { security = {}, interceptors = [] } = options;
    super(new Connection(address, security, interceptors), new BearerToken(security.token), options);
  }
}
