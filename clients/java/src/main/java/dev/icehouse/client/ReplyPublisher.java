package dev.icehouse.client;

import dev.icehouse.v1.Delta;
import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.StreamResponse;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Flow;
import java.util.concurrent.atomic.AtomicBoolean;

/**
 * A running output for one subscriber, either to its events or to {@link #texts}. It begins with the subscription and
 * is no faster than the subscriber. Cancelling the subscription ends it on the server too.
 */
public final class ReplyPublisher implements Flow.Publisher<StreamResponse> {
  private final Flow.Publisher<StreamResponse> responses;
  private final ReplySum sum;
  private final CompletableFuture<Reply> reply = new CompletableFuture<>();
  private final AtomicBoolean isTaken = new AtomicBoolean();

  ReplyPublisher(Flow.Publisher<StreamResponse> responses, GenerateRequest request) {
    this.responses = responses;
    this.sum = new ReplySum(request);
  }

  @Override
  public void subscribe(Flow.Subscriber<? super StreamResponse> subscriber) {
    // A second subscriber is refused; that does not concern the reply.
    responses.subscribe(isTaken.compareAndSet(false, true) ? new Summing(subscriber) : subscriber);
  }

  /** The pieces of text of the first completion. */
  public Flow.Publisher<String> texts() {
    return subscriber -> subscribe(new Texts(subscriber));
  }

  /** The whole answer, after the subscriber's last event, or the failure. It is cancelled if the subscription is. */
  public CompletableFuture<Reply> reply() {
    return reply;
  }

  /** Passes everything on to a subscriber. */
  private abstract static class Relay<T> implements Flow.Subscriber<StreamResponse> {
    final Flow.Subscriber<? super T> subscriber;
    Flow.Subscription subscription;

    private Relay(Flow.Subscriber<? super T> subscriber) {
      this.subscriber = subscriber;
    }

    @Override
    public void onSubscribe(Flow.Subscription subscription) {
      this.subscription = subscription;
      subscriber.onSubscribe(subscription);
    }

    @Override
    public void onError(Throwable failure) {
      subscriber.onError(failure);
    }

    @Override
    public void onComplete() {
      subscriber.onComplete();
    }
  }

  private final class Summing extends Relay<StreamResponse> implements Flow.Subscription {
    private Summing(Flow.Subscriber<? super StreamResponse> subscriber) {
      super(subscriber);
    }

    @Override
    public void onSubscribe(Flow.Subscription subscription) {
      this.subscription = subscription;
      subscriber.onSubscribe(this);
    }

    @Override
    public void onNext(StreamResponse response) {
      sum.add(response);
      subscriber.onNext(response);
    }

    @Override
    public void onError(Throwable failure) {
      reply.completeExceptionally(failure);
      super.onError(failure);
    }

    @Override
    public void onComplete() {
      sum.reply()
          .ifPresentOrElse(
              reply::complete,
              () -> reply.completeExceptionally(new IllegalStateException("the stream ended before its output")));
      super.onComplete();
    }

    @Override
    public void request(long count) {
      subscription.request(count);
    }

    @Override
    public void cancel() {
      subscription.cancel();
      reply.cancel(false);
    }
  }

  private static final class Texts extends Relay<String> {
    private Texts(Flow.Subscriber<? super String> subscriber) {
      super(subscriber);
    }

    @Override
    public void onNext(StreamResponse response) {
      Delta delta = response.getDelta();
      if (delta.getCompletionIndex() == 0 && !delta.getText().isEmpty()) {
        subscriber.onNext(delta.getText());
      } else {
        // The subscriber requested a text, and this was none.
        subscription.request(1);
      }
    }
  }
}
