package dev.icehouse.client;

import dev.icehouse.v1.Finished;
import dev.icehouse.v1.MalformedToolCall;
import dev.icehouse.v1.ToolCall;
import java.util.List;

/**
 * One complete output of a stream.
 *
 * @param text the output's text
 * @param reasoning what the model thought before it spoke
 * @param tokenIds the tokens that were generated
 * @param toolCalls the calls that the model made, put together from their pieces
 * @param malformedToolCalls parts of the text that began as calls and cannot be read as such
 * @param finished the reason of the end and the usage
 */
public record Output(
    String text,
    String reasoning,
    List<Integer> tokenIds,
    List<ToolCall> toolCalls,
    List<MalformedToolCall> malformedToolCalls,
    Finished finished) {}
