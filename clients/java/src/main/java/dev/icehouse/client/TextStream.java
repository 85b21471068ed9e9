package dev.icehouse.client;

import dev.icehouse.v1.Delta;
import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;
import dev.icehouse.v1.Started;
import dev.icehouse.v1.StreamResponse;
import java.util.Iterator;
import java.util.List;
import java.util.NoSuchElementException;
import java.util.Optional;
import java.util.stream.Stream;

/**
 * A running output: iterate over its pieces of text (of several completions the first one's), or over
 * {@link #events}, once and in one thread. Closing
 * it, from any thread, ends the output on the server too; to leave a loop early is not enough.
 */
public final class TextStream implements Iterable<String>, AutoCloseable {
  private final ResponseStream<StreamResponse> responses;
  private final List<OutputSum> outputs;
  private Started started;

  TextStream(InferenceServiceBlockingStub inference, GenerateRequest request) {
    responses = new ResponseStream<>(() -> inference.stream(request));
    outputs = Stream.generate(OutputSum::new).limit(Math.max(1, request.getCompletions())).toList();
  }

  @Override
  public Iterator<String> iterator() {
    return new Texts(events());
  }

  /** Every event as the API has it: how far the prompt is, text, reasoning and calls as they come. */
  public Iterator<StreamResponse> events() {
    return new Events(responses.iterator());
  }

  /** What the server said when it began; empty before the first text. */
  public Optional<Started> started() {
    return Optional.ofNullable(started);
  }

  /** The whole answer; throws IllegalStateException before its end. */
  public Reply reply() {
    List<Output> complete = outputs.stream().flatMap(output -> output.output().stream()).toList();
    if (started == null || complete.size() < outputs.size()) {
      throw new IllegalStateException("the stream has not ended; iterate over it first");
    }
    return new Reply(started, complete);
  }

  /** Ends the output on the server too. Harmless after the end. */
  @Override
  public void close() {
    responses.close();
  }

  private void add(StreamResponse response) {
    switch (response.getEventCase()) {
      case STARTED -> started = response.getStarted();
      case DELTA -> outputs.get(response.getDelta().getCompletionIndex()).add(response.getDelta());
      case FINISHED -> outputs.get(response.getFinished().getCompletionIndex()).finish(response.getFinished());
      default -> {
        // Progress, and what is newer than this client, is for those who ask for events.
      }
    }
  }

  private final class Events implements Iterator<StreamResponse> {
    private final Iterator<StreamResponse> responses;

    private Events(Iterator<StreamResponse> responses) {
      this.responses = responses;
    }

    @Override
    public boolean hasNext() {
      return responses.hasNext();
    }

    @Override
    public StreamResponse next() {
      StreamResponse response = responses.next();
      add(response);
      return response;
    }
  }

  private static final class Texts implements Iterator<String> {
    private final Iterator<StreamResponse> events;
    private String ahead = "";

    private Texts(Iterator<StreamResponse> events) {
      this.events = events;
    }

    @Override
    public boolean hasNext() {
      while (ahead.isEmpty() && events.hasNext()) {
        Delta delta = events.next().getDelta();
        ahead = delta.getCompletionIndex() == 0 ? delta.getText() : "";
      }
      return !ahead.isEmpty();
    }

    @Override
    public String next() {
      if (!hasNext()) {
        throw new NoSuchElementException("the stream has ended");
      }
      String text = ahead;
      ahead = "";
      return text;
    }
  }
}
