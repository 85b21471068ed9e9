import { ChannelCredentials, credentials } from "@grpc/grpc-js";

import type { TokenSource } from "./token.js";

/** TLS and credentials of a connection. PEM contents, not paths. */
export interface Security {
  /** Use TLS and trust the system's authorities; implied by `ca` and by `certificate`. */
  readonly tls?: boolean;
  /** Authorities to trust instead. */
  readonly ca?: Buffer;
  /** The client's own certificate and key, for mTLS. */
  readonly certificate?: Buffer;
  readonly key?: Buffer;
  /** Expected in the server's certificate when it differs from the address. */
  readonly serverName?: string;
  /**
   * Goes with every call as a bearer token. Without TLS whoever is on the way can read it. What a source returns is
   * kept until the server refuses it; then the source is asked anew and the refused call made again, once.
   */
  readonly token?: string | TokenSource;
}

/** Returns what gRPC secures the channel with. */
export function channelCredentials({ tls, ca, certificate, key }: Security): ChannelCredentials {
  if (!tls && !ca && !certificate) return credentials.createInsecure();
  return credentials.createSsl(ca ?? null, key ?? null, certificate ?? null);
}
