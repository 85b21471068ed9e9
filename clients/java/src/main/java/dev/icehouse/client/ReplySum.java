package dev.icehouse.client;

import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.Started;
import dev.icehouse.v1.StreamResponse;
import java.util.List;
import java.util.Optional;
import java.util.stream.Stream;

/** Adds up the events of a stream. */
final class ReplySum {
  private final List<OutputSum> outputs;
  private volatile Started started;

  ReplySum(GenerateRequest request) {
    outputs = Stream.generate(OutputSum::new).limit(Math.max(1, request.getCompletions())).toList();
  }

  void add(StreamResponse response) {
    switch (response.getEventCase()) {
      case STARTED -> started = response.getStarted();
      case DELTA -> outputs.get(response.getDelta().getCompletionIndex()).add(response.getDelta());
      case FINISHED -> outputs.get(response.getFinished().getCompletionIndex()).finish(response.getFinished());
      default -> {
        // Progress, and events that are newer than this client.
      }
    }
  }

  Optional<Started> started() {
    return Optional.ofNullable(started);
  }

  /** The whole answer; empty before its end. */
  Optional<Reply> reply() {
    List<Output> complete = outputs.stream().flatMap(output -> output.output().stream()).toList();
    return started().filter(begun -> complete.size() == outputs.size()).map(begun -> new Reply(begun, complete));
  }
}
