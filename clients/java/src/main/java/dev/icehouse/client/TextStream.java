package dev.icehouse.client;

import dev.icehouse.v1.Delta;
import dev.icehouse.v1.Finished;
import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;
import dev.icehouse.v1.Started;
import dev.icehouse.v1.StreamResponse;
import io.grpc.Context;
import io.grpc.StatusRuntimeException;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.NoSuchElementException;

/**
 * A running output: iterate over its pieces of text (of several completions the first one's), or over
 * {@link #events}, once and in one thread. Closing
 * it, from any thread, ends the output on the server too; to leave a loop early is not enough.
 */
public final class TextStream implements Iterable<String>, AutoCloseable {
  private final Context.CancellableContext context = Context.current().withCancellation();
  private final Iterator<StreamResponse> responses;
  private final StringBuilder text = new StringBuilder();
  private final List<Integer> tokenIds = new ArrayList<>();
  private Started started;
  private Finished finished;

  TextStream(InferenceServiceBlockingStub inference, GenerateRequest request) {
    Context before = context.attach();
    try {
      responses = inference.stream(request);
    } finally {
      context.detach(before);
    }
  }

  @Override
  public Iterator<String> iterator() {
    return new Texts(events());
  }

  /** Every event as the API has it, reasoning, tool calls and progress among them. */
  public Iterator<StreamResponse> events() {
    return new Events();
  }

  /** The whole output; throws IllegalStateException before its end. */
  public Reply reply() {
    if (started == null || finished == null) {
      throw new IllegalStateException("the stream has not ended; iterate over it first");
    }
    return new Reply(text.toString(), List.copyOf(tokenIds), started, finished);
  }

  /** Ends the output on the server too. Harmless after the end. */
  @Override
  public void close() {
    context.cancel(null);
  }

  private void add(StreamResponse response) {
    switch (response.getEventCase()) {
      case STARTED -> started = response.getStarted();
      case FINISHED -> {
        if (response.getFinished().getCompletionIndex() == 0) {
          finished = response.getFinished();
        }
      }
      case DELTA -> {
        Delta delta = response.getDelta();
        if (delta.getCompletionIndex() == 0) {
          text.append(delta.getText());
          tokenIds.addAll(delta.getTokenIdsList());
        }
      }
      default -> {
        // Progress, and what is newer than this client, is for those who ask for events.
      }
    }
  }

  private final class Events implements Iterator<StreamResponse> {
    @Override
    public boolean hasNext() {
      try {
        boolean isRunning = responses.hasNext();
        if (!isRunning) {
          close();
        }
        return isRunning;
      } catch (StatusRuntimeException failure) {
        throw new IcehouseException(failure);
      }
    }

    @Override
    public StreamResponse next() {
      if (!hasNext()) {
        throw new NoSuchElementException("the stream has ended");
      }
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
