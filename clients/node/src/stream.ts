import type { Finished, Started, StreamResponse } from "./gen/icehouse/v1/inference_service_pb.js";

/**
 * A complete output and the server's first and last word on it. Where several completions were asked for it
 * is the first of them; `events()` has them all.
 */
export interface Reply {
  readonly text: string;
  readonly tokenIds: readonly number[];
  /** The request's id, model, seed and what was reused of the prompt. */
  readonly started: Started;
  /** The reason of the end and the usage. */
  readonly finished: Finished;
}

/**
 * A running output: iterate over its pieces of text (of several completions the first one's), or over
 * `events()`, once. Leaving the loop early ends the output on the server.
 */
export class Stream implements AsyncIterable<string> {
  readonly #begin: () => AsyncGenerator<StreamResponse, void, undefined>;
  readonly #tokenIds: number[] = [];
  #text = "";
  #started: Started | undefined;
  #finished: Finished | undefined;

  constructor(begin: () => AsyncGenerator<StreamResponse, void, undefined>) {
    this.#begin = begin;
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<string, void, undefined> {
    for await (const { event } of this.events()) {
      if (event.case === "delta" && isFirst(event.value) && event.value.text) yield event.value.text;
    }
  }

  /** Yields every event as the API has it, reasoning, tool calls and progress among them. */
  async *events(): AsyncGenerator<StreamResponse, void, undefined> {
    for await (const response of this.#begin()) {
      const { event } = response;
      if (event.case === "started") this.#started = event.value;
      else if (event.case === "finished" && isFirst(event.value)) this.#finished = event.value;
      else if (event.case === "delta" && isFirst(event.value)) {
        this.#text += event.value.text;
        this.#tokenIds.push(...event.value.tokenIds);
      }
      yield response;
    }
  }

  /** The whole output; throws before its end. */
  get reply(): Reply {
    if (!this.#started || !this.#finished) throw new Error("the stream has not ended; iterate over it first");
    return { text: this.#text, tokenIds: this.#tokenIds, started: this.#started, finished: this.#finished };
  }
}

function isFirst({ completionIndex }: { readonly completionIndex: number }): boolean {
  return completionIndex === 0;
}
