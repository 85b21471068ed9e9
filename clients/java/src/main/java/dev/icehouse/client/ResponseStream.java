package dev.icehouse.client;

import io.grpc.Context;
import io.grpc.StatusRuntimeException;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.function.Supplier;

/**
 * The answers of a call that has many: iterate over them once and in one thread. Closing it, from any thread,
 * ends the call on the server too; to leave a loop early is not enough.
 *
 * @param <T> the answer's message
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

  /** Ends the call on the server too. Harmless after the end. */
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
