package dev.icehouse.client;

import com.google.protobuf.Message;
import io.grpc.ClientCall;
import io.grpc.Context;
import io.grpc.Deadline;
import io.grpc.Metadata;
import io.grpc.Status;
import java.time.Duration;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.function.Supplier;

/**
 * A call with one request, which carries the token and the request's prefix key. It is sent again if the server refuses
 * it for now or refuses its token.
 *
 * <p>The headers of a call are sent when it starts, before its request is known; so the start is delayed until the
 * request. That is possible because all calls of the API but Import have one request, which the stubs send before they
 * wait for anything. The caller does not notice refused attempts, except for the last.
 *
 * <p>The caller's context cancels the call, but gRPC works in a fork of it. A thread of the caller that does the work
 * of the channel also starts the connection's health check, in its own context; without the fork, the end of one call
 * would end the health check for all.
 */
final class PromptedCall<I, O> extends ClientCall<I, O> {
  static final Metadata.Key<String> AUTHORIZATION =
      Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);
  private static final Metadata.Key<String> PREFIX_KEY =
      Metadata.Key.of(PrefixKey.HEADER, Metadata.ASCII_STRING_MARSHALLER);

  /** What all attempts of a call share. */
  record Terms(Optional<BearerToken> token, int retryLimit, Optional<Deadline> deadline) {}

  private final Supplier<ClientCall<I, O>> attempts;
  private final Terms terms;
  private final Context context = Context.current();
  private final Context fork = context.fork();
  private final Context.CancellationListener onCancel = this::follow;
  private Listener<O> listener;
  private Metadata headers;
  private I request;
  private String sentToken;
  private boolean hasRenewed;
  private int retriesLeft;

  // Shared by the threads of the caller, the attempts and the timer.
  private ClientCall<I, O> current;
  private boolean isWaiting = true;
  private int requestedCount;
  private Optional<Cancellation> cancellation = Optional.empty();

  private record Cancellation(String reason, Throwable cause) {}

  PromptedCall(Supplier<ClientCall<I, O>> attempts, Terms terms) {
    this.attempts = attempts;
    this.terms = terms;
    this.retriesLeft = terms.retryLimit();
  }

  @Override
  public void start(Listener<O> listener, Metadata headers) {
    this.listener = listener;
    this.headers = headers;
    context.addListener(onCancel, Runnable::run);
  }

  @Override
  public void sendMessage(I request) {
    this.request = request;
    begin(announced());
  }

  @Override
  public void halfClose() {
    // Each attempt does it with its request.
  }

  @Override
  public synchronized void request(int count) {
    requestedCount = (int) Math.min(Integer.MAX_VALUE, (long) requestedCount + count);
    if (!isWaiting) {
      fork.run(() -> current.request(count));
    }
  }

  @Override
  public synchronized void cancel(String reason, Throwable cause) {
    cancellation = Optional.of(new Cancellation(reason, cause));
    if (!isWaiting) {
      fork.run(() -> current.cancel(reason, cause));
    } else if (listener != null) {
      // Only a running call can notify its listener of its end.
      begin(new Metadata());
    }
  }

  /** Cancels the call with its caller's context. A deadline of the context is the call's own already. */
  private void follow(Context cancelled) {
    if (!(cancelled.cancellationCause() instanceof TimeoutException)) {
      cancel("the caller's context was cancelled", cancelled.cancellationCause());
    }
  }

  /** Returns the headers of an attempt, with a token unless the caller has set one. */
  private Metadata announced() {
    var sent = new Metadata();
    sent.merge(headers);
    if (request instanceof Message message) {
      PrefixKey.of(message).ifPresent(key -> sent.put(PREFIX_KEY, key));
    }
    if (!sent.containsKey(AUTHORIZATION)) {
      sentToken = terms.token().map(BearerToken::current).orElse(null);
      if (sentToken != null) {
        sent.put(AUTHORIZATION, "Bearer " + sentToken);
      }
    }
    return sent;
  }

  private synchronized void begin(Metadata sent) {
    if (isWaiting) {
      isWaiting = false;
      fork.run(() -> attempt(sent));
    }
  }

  private void attempt(Metadata sent) {
    current = attempts.get();
    current.start(new Attempt(), sent);
    if (cancellation.isPresent()) {
      current.cancel(cancellation.get().reason(), cancellation.get().cause());
      return;
    }
    if (requestedCount > 0) {
      current.request(requestedCount);
    }
    current.sendMessage(request);
    current.halfClose();
  }

  /** Sends a refused call again if it should be; returns whether it will be. */
  private boolean isSentAgain(IcehouseException refusal) {
    Optional<Duration> delay = delayAfter(refusal);
    if (delay.isEmpty()) {
      return false;
    }
    boolean isCancelled;
    synchronized (this) {
      isWaiting = true;
      isCancelled = cancellation.isPresent();
    }
    if (isCancelled) {
      // The caller cancelled while the refusal was on its way, and is told of the cancellation.
      begin(new Metadata());
    } else if (delay.get().isZero()) {
      beginAgain();
    } else {
      CompletableFuture.delayedExecutor(delay.get().toNanos(), TimeUnit.NANOSECONDS).execute(this::beginAgain);
    }
    return true;
  }

  private Optional<Duration> delayAfter(IcehouseException refusal) {
    if (refusal.code() == Status.Code.UNAUTHENTICATED && sentToken != null && !hasRenewed) {
      hasRenewed = true;
      return terms.token().filter(token -> token.refused(sentToken)).map(token -> Duration.ZERO);
    }
    if (retriesLeft == 0) {
      return Optional.empty();
    }
    retriesLeft--;
    return RetryPolicy.delayAfter(refusal).filter(this::isInTime);
  }

  private boolean isInTime(Duration delay) {
    return terms.deadline().filter(limit -> limit.timeRemaining(TimeUnit.NANOSECONDS) <= delay.toNanos()).isEmpty();
  }

  private void beginAgain() {
    try {
      begin(announced());
    } catch (RuntimeException error) {
      var failed = Status.UNAUTHENTICATED.withDescription("the token's source failed").withCause(error);
      end(failed, new Metadata());
    }
  }

  private void end(Status status, Metadata trailers) {
    context.removeListener(onCancel);
    listener.onClose(status, trailers);
  }

  /** Passes on the answers of an attempt. Its headers wait until it is certain that this is the last attempt. */
  private final class Attempt extends Listener<O> {
    private Metadata answerHeaders;
    private boolean isAnswering;

    @Override
    public void onHeaders(Metadata headers) {
      answerHeaders = headers;
    }

    @Override
    public void onMessage(O message) {
      answer();
      listener.onMessage(message);
    }

    @Override
    public void onClose(Status status, Metadata trailers) {
      if (!isAnswering && !status.isOk() && isSentAgain(new IcehouseException(status.asRuntimeException(trailers)))) {
        return;
      }
      answer();
      end(status, trailers);
    }

    @Override
    public void onReady() {
      listener.onReady();
    }

    private void answer() {
      if (!isAnswering && answerHeaders != null) {
        listener.onHeaders(answerHeaders);
      }
      isAnswering = true;
    }
  }
}
