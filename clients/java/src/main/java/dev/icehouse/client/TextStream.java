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
 * A running output. Iterate once, in one thread, either over its pieces of text (those of the first completion) or over
 * {@link #events}. Close it, from any thread, to end the output on the server too; leaving the loop is not enough.
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

  /** Every event of the API: progress of the prompt, text, reasoning and pieces of tool calls. */
  public Iterator<StreamResponse> events() {
    return new Events(responses.iterator());
  }

  /** What the server sent when the output began; empty before that. */
  public Optional<Started> started() {
    return sum.started();
  }

  /** The whole answer. Throws IllegalStateException before the stream has ended. */
  public Reply reply() {
    return sum.reply()
        .orElseThrow(() -> new IllegalStateException("the stream has not ended; iterate over it first"));
  }

  /** Ends the output on the server too. Does nothing after the end. */
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
