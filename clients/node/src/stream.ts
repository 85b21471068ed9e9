import { create } from "@bufbuild/protobuf";

import type { Answer } from "./conversation.js";
import type { Delta, Finished, Started, StreamResponse } from "./gen/icehouse/v1/inference_service_pb.js";
import { type MalformedToolCall, type ToolCall, type ToolCallDelta, ToolCallSchema } from "./gen/icehouse/v1/tool_pb.js";

/** One complete output. */
export interface Output extends Answer {
  /** Parts of the text that began as tool calls and cannot be parsed. */
  readonly malformedToolCalls: readonly MalformedToolCall[];
  /** Why the output ended, and what it cost. */
  readonly finished: Finished;
}

/** A complete answer: its first completion, and all of them in `completions`. */
export interface Reply extends Output {
  /** The request's id, model and seed, and what was reused of its prompt. */
  readonly started: Started;
  readonly completions: readonly Output[];
}

/**
 * A running output. Iterate once, either over its pieces of text (those of the first completion) or over `events()`.
 * If you leave the loop early, the output ends on the server too.
 */
export class Stream implements AsyncIterable<string> {
  readonly #begin: () => AsyncGenerator<StreamResponse, void, undefined>;
  readonly #outputs: OutputSum[];
  #started: Started | undefined;

  constructor(begin: () => AsyncGenerator<StreamResponse, void, undefined>, completionCount: number) {
    this.#begin = begin;
    this.#outputs = Array.from({ length: Math.max(1, completionCount) }, () => new OutputSum());
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<string, void, undefined> {
    for await (const { event } of this.events()) {
      if (event.case === "delta" && event.value.completionIndex === 0 && event.value.text) yield event.value.text;
    }
  }

  /** Yields every event of the API: progress of the prompt, text, reasoning and pieces of tool calls. */
  async *events(): AsyncGenerator<StreamResponse, void, undefined> {
    for await (const response of this.#begin()) {
      const { event } = response;
      if (event.case === "started") this.#started = event.value;
      else if (event.case === "delta") this.#outputs[event.value.completionIndex]?.add(event.value);
      else if (event.case === "finished") this.#outputs[event.value.completionIndex]?.finish(event.value);
      yield response;
    }
  }

  /** What the server sent when the output began; undefined before that. */
  get started(): Started | undefined {
    return this.#started;
  }

  /** The whole answer. Throws before the stream has ended. */
  get reply(): Reply {
    const completions = this.#outputs.map(({ output }) => output);
    const [first] = completions;
    if (!this.#started || !first || !completions.every(isComplete)) {
      throw new Error("the stream has not ended; iterate over it first");
    }
    return { ...first, started: this.#started, completions };
  }
}

/** Adds up one completion. */
class OutputSum {
  readonly #tokenIds: number[] = [];
  readonly #toolCalls = new Map<number, ToolCall>();
  readonly #malformedToolCalls: MalformedToolCall[] = [];
  #text = "";
  #reasoning = "";
  #finished: Finished | undefined;

  add({ text, reasoning, tokenIds, toolCall, malformedToolCall }: Delta): void {
    this.#text += text;
    this.#reasoning += reasoning;
    for (const tokenId of tokenIds) this.#tokenIds.push(tokenId);
    if (toolCall) this.#addCall(toolCall);
    if (malformedToolCall) this.#malformedToolCalls.push(malformedToolCall);
  }

  finish(finished: Finished): void {
    this.#finished = finished;
  }

  get output(): Output | undefined {
    if (!this.#finished) return undefined;
    return {
      text: this.#text,
      reasoning: this.#reasoning,
      tokenIds: this.#tokenIds,
      toolCalls: [...this.#toolCalls.values()],
      malformedToolCalls: this.#malformedToolCalls,
      finished: this.#finished,
    };
  }

  #addCall({ index, id, name, argumentsJson, withdrawn, repaired }: ToolCallDelta): void {
    const call = this.#toolCalls.get(index);
    if (withdrawn) this.#toolCalls.delete(index);
    else if (call) {
      call.argumentsJson += argumentsJson;
      call.repaired ||= repaired;
    } else this.#toolCalls.set(index, create(ToolCallSchema, { id, name, argumentsJson, repaired }));
  }
}

function isComplete(output: Output | undefined): output is Output {
  return output !== undefined;
}
