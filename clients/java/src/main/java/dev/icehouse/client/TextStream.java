package dev.icehouse.client;

import dev.icehouse.v1.Delta;
import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;
import dev.icehouse.v1.Started;
import dev.icehouse.v1.StreamResponse;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.Optional;

/**
 * A running output: iterate over its pieces of text (of several completions the first one's), or over
 * {@link #events}, once and in one thread. Closing
 * it, from any thread, ends the output on the server too; to leave a loop early is not enough.
 */
public final class TextStream implements Iterable<String>, AutoCloseable {
  private final ResponseStream<StreamResponse> responses;
  private final ReplySum sum;

  TextStream(InferenceServiceBlockingStub inference, GenerateRequest request) {
    responses = new ResponseStream<>(() -> inference.stream(request));
    sum = new ReplySum(request);
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
    return sum.started();
  }

  /** The whole answer; throws IllegalStateException before its end. */
  public Reply reply() {
    return sum.reply()
        .orElseThrow(() -> new IllegalStateException("the stream has not ended; iterate over it first"));
  }

  /** Ends the output on the server too. Harmless after the end. */
  @Override
  public void close() {
    responses.close();
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
      sum.add(response);
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
