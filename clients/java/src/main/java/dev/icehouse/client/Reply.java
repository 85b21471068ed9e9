package dev.icehouse.client;

import dev.icehouse.v1.Finished;
import dev.icehouse.v1.Started;
import dev.icehouse.v1.ToolCall;
import java.util.List;

/**
 * A complete answer. Its text and so on are those of the first completion.
 *
 * @param started the request's id, model and seed, and what was reused of its prompt
 * @param completions every output in order, at least one
 */
public record Reply(Started started, List<Output> completions) {
  /** The first output. */
  public Output first() {
    return completions.get(0);
  }

  /** The output's text. */
  public String text() {
    return first().text();
  }

  /** The model's reasoning before its answer. */
  public String reasoning() {
    return first().reasoning();
  }

  /** The tokens that were generated. */
  public List<Integer> tokenIds() {
    return first().tokenIds();
  }

  /** The calls that the model made. */
  public List<ToolCall> toolCalls() {
    return first().toolCalls();
  }

  /** Why the output ended, and what it cost. */
  public Finished finished() {
    return first().finished();
  }
}
