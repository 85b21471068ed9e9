import { Metadata, status } from "@grpc/grpc-js";

import { IcehouseError } from "./errors.js";

/** Returns the token that is valid now: reads a file that is written again, asks an identity provider. */
export type TokenSource = () => string | Promise<string>;

const AUTHORIZATION = "authorization";

/** The token of a connection: kept until the server refuses it, and then asked for anew where it has a source. */
export class BearerToken {
  readonly #source: TokenSource | undefined;
  #known: Promise<string> | undefined;

  constructor(token: string | TokenSource = "") {
    if (typeof token === "string") this.#known = Promise.resolve(token);
    else this.#source = token;
  }

  /** Returns `headers` with the token to send, unless they say themselves who calls. */
  async authorized(headers: Metadata): Promise<Metadata> {
    if (headers.get(AUTHORIZATION).length > 0) return headers;
    const token = await this.#current();
    if (!token) return headers;
    const authorized = headers.clone();
    authorized.set(AUTHORIZATION, `Bearer ${token}`);
    return authorized;
  }

  /**
   * Returns whether there may be another token than the one that was sent, and forgets that: the server refused it,
   * so that nothing of the call has run.
   */
  async isRenewed(error: unknown, headers: Metadata, sent: Metadata): Promise<boolean> {
    if (!this.#source || headers === sent) return false;
    if (!(error instanceof IcehouseError) || error.code !== status.UNAUTHENTICATED) return false;
    const known = this.#known;
    const [refused] = sent.get(AUTHORIZATION);
    // Another call may have brought a new one meanwhile.
    if (known && `Bearer ${await known}` === refused && this.#known === known) this.#known = undefined;
    return true;
  }

  async #current(): Promise<string> {
    if (!this.#known) {
      const asked = this.#asked();
      this.#known = asked;
      // One that failed is asked again by the next call.
      asked.catch(() => {
        if (this.#known === asked) this.#known = undefined;
      });
    }
    return this.#known;
  }

  /** Asks the source, once for all calls that wait. */
  async #asked(): Promise<string> {
    return (await this.#source?.()) ?? "";
  }
}
