import { ChannelCredentials, credentials } from "@grpc/grpc-js";

import type { TokenSource } from "./token.js";

/** TLS and credentials of a client. PEM contents, not paths. */
export interface Security {
  /** Use TLS and trust the system's authorities. Implied by `ca` and by `certificate`. */
  readonly tls?: boolean;
  /** Authorities to trust instead of the system's. */
  readonly ca?: Buffer;
  /** The client's own certificate and key, for mTLS. */
  readonly certificate?: Buffer;
  readonly key?: Buffer;
  /** The name in the server's certificate. Default: the host of the address. */
  readonly serverName?: string;
  /**
   * Sent with every call as a bearer token; use TLS, or others on the network can read it. A function is called once,
   * and again when the server refuses the token; the refused call is then sent once more.
   */
  readonly token?: string | TokenSource;
}

/** Returns what gRPC secures the channel with. */
export function channelCredentials({ tls, ca, certificate, key }: Security): ChannelCredentials {
  if (!tls && !ca && !certificate) return credentials.createInsecure();
  return credentials.createSsl(ca ?? null, key ?? null, certificate ?? null);
}
