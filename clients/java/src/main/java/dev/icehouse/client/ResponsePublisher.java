package dev.icehouse.client;

import io.grpc.ClientCall;
import io.grpc.Metadata;
import io.grpc.Status;
import java.util.Objects;
import java.util.concurrent.Flow;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.function.Supplier;

/**
 * The answers of a streaming call, for one subscriber. The call begins with the subscription. No more is read from the
 * connection than the subscriber requests, so HTTP/2's flow control slows the server down. Cancelling the subscription
 * ends the call on the server too. A failure is an {@link IcehouseException}.
 *
 * @param <T> the message of an answer
 */
public final class ResponsePublisher<T> implements Flow.Publisher<T> {
  private final Supplier<Begun<T>> calls;
  private final AtomicBoolean isTaken = new AtomicBoolean();

  /** A call that is not started yet, and what sends its request. */
  record Begun<T>(ClientCall<?, T> call, Runnable send) {}

  ResponsePublisher(Supplier<Begun<T>> calls) {
    this.calls = calls;
  }

  @Override
  public void subscribe(Flow.Subscriber<? super T> subscriber) {
    Objects.requireNonNull(subscriber, "a subscriber is needed");
    if (!isTaken.compareAndSet(false, true)) {
      subscriber.onSubscribe(new NoSubscription());
      subscriber.onError(new IllegalStateException("this stream has a subscriber already; it may have only one"));
      return;
    }
    Begun<T> begun = calls.get();
    new Run<T>(subscriber, begun.call()).begin(begun.send());
  }

  private static final class NoSubscription implements Flow.Subscription {
    @Override
    public void request(long count) {}

    @Override
    public void cancel() {}
  }

  private static final class Run<T> extends ClientCall.Listener<T> implements Flow.Subscription {
    private final Flow.Subscriber<? super T> subscriber;
    private final ClientCall<?, T> call;
    private volatile boolean isCancelled;
    private volatile RuntimeException ownFailure;

    private Run(Flow.Subscriber<? super T> subscriber, ClientCall<?, T> call) {
      this.subscriber = subscriber;
      this.call = call;
    }

    private void begin(Runnable send) {
      call.start(this, new Metadata());
      subscriber.onSubscribe(this);
      try {
        send.run();
      } catch (RuntimeException error) {
        fail(error);
      }
    }

    @Override
    public void request(long count) {
      if (count <= 0) {
        fail(new IllegalArgumentException(count + " answers were requested; it must be at least 1"));
      } else {
        call.request((int) Math.min(count, Integer.MAX_VALUE));
      }
    }

    @Override
    public void cancel() {
      isCancelled = true;
      call.cancel("the subscription was cancelled", null);
    }

    /** Ends the call. Only its end calls the subscriber, so that two threads never do at once. */
    private void fail(RuntimeException error) {
      ownFailure = error;
      call.cancel(error.getMessage(), error);
    }

    @Override
    public void onMessage(T message) {
      if (!isCancelled) {
        subscriber.onNext(message);
      }
    }

    @Override
    public void onClose(Status status, Metadata trailers) {
      if (isCancelled) {
        return;
      }
      if (ownFailure != null) {
        subscriber.onError(ownFailure);
      } else if (status.isOk()) {
        subscriber.onComplete();
      } else {
        subscriber.onError(new IcehouseException(status.asRuntimeException(trailers)));
      }
    }
  }
}
