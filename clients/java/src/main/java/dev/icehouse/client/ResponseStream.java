package dev.icehouse.client;

import io.grpc.Context;
import io.grpc.StatusRuntimeException;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.function.Supplier;

/**
 * The answers of a streaming call. Iterate over them once, in one thread. Close it, from any thread, to end the call on
 * the server too; leaving the loop is not enough.
 *
 * @param <T> the message of an answer
 */
public final class ResponseStream<T> implements Iterable<T>, AutoCloseable {
  private final Context.CancellableContext context = Context.current().withCancellation();
  private final Iterator<T> responses;

  ResponseStream(Supplier<Iterator<T>> call) {
    Context before = context.attach();
    try {
      responses = call.get();
    } finally {
      context.detach(before);
    }
  }

  @Override
  public Iterator<T> iterator() {
    return new Translated();
  }

  /** Ends the call on the server too. Does nothing after the end. */
  @Override
  public void close() {
    context.cancel(null);
  }

  private final class Translated implements Iterator<T> {
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
    public T next() {
      if (!hasNext()) {
        throw new NoSuchElementException("the stream has ended");
      }
      return responses.next();
    }
  }
}
