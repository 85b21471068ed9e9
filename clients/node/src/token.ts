import { IcehouseError } from "./errors.js";
import { UNAUTHENTICATED } from "./status.js";

/** Returns a valid token, for example from a file that is rotated or from an identity provider. */
export type TokenSource = () => string | Promise<string>;

type Headers = Readonly<Record<string, string>>;

/** The token of a client. It is kept until the server refuses it; then its source, if it has one, is asked again. */
export class BearerToken {
  readonly #source: TokenSource | undefined;
  #known: Promise<string> | undefined;

  constructor(token: string | TokenSource = "") {
    if (typeof token === "string") this.#known = Promise.resolve(token);
    else this.#source = token;
  }

  /**
   * Returns what `send` returns. It is called with `headers` and the token, and once more with a new token if the
   * server refuses the first, since nothing of that call has run.
   */
  async once<T>(headers: Headers, send: (headers: Headers) => Promise<T>): Promise<T> {
    const token = await this.#tokenFor(headers);
    try {
      return await send(authorized(headers, token));
    } catch (error) {
      if (!(await this.#isRenewed(error, token))) throw error;
    }
    return send(authorized(headers, await this.#tokenFor(headers)));
  }

  /** As `once`, for calls that stream their answers. They are sent again only before the first answer. */
  async *each<T>(
    headers: Headers,
    begin: (headers: Headers) => AsyncGenerator<T, void, undefined>,
  ): AsyncGenerator<T, void, undefined> {
    const token = await this.#tokenFor(headers);
    let isAnswered = false;
    try {
      for await (const answer of begin(authorized(headers, token))) {
        isAnswered = true;
        yield answer;
      }
      return;
    } catch (error) {
      if (isAnswered || !(await this.#isRenewed(error, token))) throw error;
    }
    yield* begin(authorized(headers, await this.#tokenFor(headers)));
  }

  /** Returns the token to send; none if the call's own headers have one. */
  async #tokenFor(headers: Headers): Promise<string> {
    if (Object.keys(headers).some((name) => name.toLowerCase() === "authorization")) return "";
    if (!this.#known) {
      const asked = this.#asked();
      this.#known = asked;
      // After a failure the next call asks again.
      asked.catch(() => {
        if (this.#known === asked) this.#known = undefined;
      });
    }
    return this.#known;
  }

  /** Asks the source, once for all waiting calls. */
  async #asked(): Promise<string> {
    return (await this.#source?.()) ?? "";
  }

  /** Returns whether a call that was refused with this token may try a new one, and forgets the refused one. */
  async #isRenewed(error: unknown, refused: string): Promise<boolean> {
    if (!this.#source || !refused) return false;
    if (!(error instanceof IcehouseError) || error.code !== UNAUTHENTICATED) return false;
    const known = this.#known;
    // Another call may have fetched a new one in the meantime.
    if (known && (await known) === refused && this.#known === known) this.#known = undefined;
    return true;
  }
}

function authorized(headers: Headers, token: string): Headers {
  return token ? { ...headers, authorization: `Bearer ${token}` } : headers;
}
