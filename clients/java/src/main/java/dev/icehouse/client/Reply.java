package dev.icehouse.client;

import dev.icehouse.v1.Finished;
import dev.icehouse.v1.Started;
import java.util.List;

/**
 * A complete output and the server's first and last word on it. Where several completions were asked for it
 * is the first of them; {@link TextStream#events} has them all.
 *
 * @param text the output's text
 * @param tokenIds the tokens that were generated
 * @param started the request's id, model, seed and what was reused of the prompt
 * @param finished the reason of the end and the usage
 */
public record Reply(String text, List<Integer> tokenIds, Started started, Finished finished) {}
