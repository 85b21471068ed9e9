import { IcehouseError } from "./errors.js";
import { UNAUTHENTICATED } from "./status.js";

/** Returns the token that is valid now: reads a file that is written again, asks an identity provider. */
export type TokenSource = () => string | Promise<string>;

type Headers = Readonly<Record<string, string>>;

/** The token of a connection: kept until the server refuses it, and then asked for anew where it has a source. */
export class BearerToken {
  readonly #source: TokenSource | undefined;
  #known: Promise<string> | undefined;

  constructor(token: string | TokenSource = "") {
    if (typeof token === "string") this.#known = Promise.resolve(token);
    else this.#source = token;
  }

  /**
   * Returns what `send` returns, which is called with `headers` and the token, and once more with another token
   * where the server refuses the first: nothing of that call has run.
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

  /** As `once`, for calls with many answers: before the first of them. */
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

  /** Returns the token to send; none where the call's own headers say who calls. */
  async #tokenFor(headers: Headers): Promise<string> {
    if (Object.keys(headers).some((name) => name.toLowerCase() === "authorization")) return "";
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

  /** Returns whether there may be another token than the one that was refused, and forgets that. */
  async #isRenewed(error: unknown, refused: string): Promise<boolean> {
    if (!this.#source || !refused) return false;
    if (!(error instanceof IcehouseError) || error.code !== UNAUTHENTICATED) return false;
    const known = this.#known;
    // Another call may have brought a new one meanwhile.
    if (known && (await known) === refused && this.#known === known) this.#known = undefined;
    return true;
  }
}

function authorized(headers: Headers, token: string): Headers {
  return token ? { ...headers, authorization: `Bearer ${token}` } : headers;
}
