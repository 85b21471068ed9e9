package dev.icehouse.client;

import dev.icehouse.v1.Finished;
import dev.icehouse.v1.MalformedToolCall;
import dev.icehouse.v1.ToolCall;
import java.util.List;

/**
 * One complete output of a stream.
 *
 * @param text the output's text
 * @param reasoning the model's reasoning before its answer
 * @param tokenIds the tokens that were generated
 * @param toolCalls the calls that the model made
 * @param malformedToolCalls parts of the text that began as tool calls and cannot be parsed
 * @param finished why the output ended, and what it cost
 */
public record Output(
    String text,
    String reasoning,
    List<Integer> tokenIds,
    List<ToolCall> toolCalls,
    List<MalformedToolCall> malformedToolCalls,
    Finished finished) {}
