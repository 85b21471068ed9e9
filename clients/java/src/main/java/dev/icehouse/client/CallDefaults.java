package dev.icehouse.client;

import com.google.protobuf.Message;
import dev.icehouse.v1.CacheServiceGrpc;
import dev.icehouse.v1.InferenceServiceGrpc;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.ForwardingClientCall.SimpleForwardingClientCall;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import java.time.Duration;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.TimeUnit;

/**
 * Gives every call the token, the prefix key of its request, and a deadline where it has none.
 *
 * <p>A call's headers are sent when it starts, and its request is known only after that: so the start waits for
 * the request. The API's calls have one request each, which the stubs send before they wait for anything.
 */
final class CallDefaults implements ClientInterceptor {
  private static final Metadata.Key<String> AUTHORIZATION =
      Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);
  private static final Metadata.Key<String> PREFIX_KEY =
      Metadata.Key.of(PrefixKey.HEADER, Metadata.ASCII_STRING_MARSHALLER);

  private static final Set<String> ORDERS =
      Set.of(
          CacheServiceGrpc.getWarmMethod().getFullMethodName(),
          CacheServiceGrpc.getEvictMethod().getFullMethodName(),
          CacheServiceGrpc.getVerifyMethod().getFullMethodName());

  private final Optional<Duration> timeout;
  private final Optional<Duration> orderTimeout;
  private final Optional<String> token;

  CallDefaults(Optional<Duration> timeout, Optional<Duration> orderTimeout, Optional<String> token) {
    this.timeout = timeout;
    this.orderTimeout = orderTimeout;
    this.token = token;
  }

  @Override
  public <I, O> ClientCall<I, O> interceptCall(
      MethodDescriptor<I, O> method, CallOptions options, Channel next) {
    CallOptions bounded = options;
    Optional<Duration> limit = ORDERS.contains(method.getFullMethodName()) ? orderTimeout : timeout;
    if (limit.isPresent() && options.getDeadline() == null && isBounded(method)) {
      bounded = options.withDeadlineAfter(limit.get().toNanos(), TimeUnit.NANOSECONDS);
    }
    return new KeyedCall<>(next.newCall(method, bounded));
  }

  private final class KeyedCall<I, O> extends SimpleForwardingClientCall<I, O> {
    private Listener<O> listener;
    private Metadata headers;
    private int requestedCount;
    private boolean isStarted;

    private KeyedCall(ClientCall<I, O> call) {
      super(call);
    }

    @Override
    public void start(Listener<O> listener, Metadata headers) {
      this.listener = listener;
      this.headers = headers;
    }

    @Override
    public void request(int count) {
      if (isStarted) {
        super.request(count);
      } else {
        requestedCount += count;
      }
    }

    @Override
    public void sendMessage(I request) {
      if (request instanceof Message message) {
        PrefixKey.of(message).ifPresent(key -> headers.put(PREFIX_KEY, key));
      }
      begin();
      super.sendMessage(request);
    }

    @Override
    public void halfClose() {
      begin();
      super.halfClose();
    }

    @Override
    public void cancel(String reason, Throwable cause) {
      // A call that was never started could not tell its listener of its end.
      if (listener != null) {
        begin();
      }
      super.cancel(reason, cause);
    }

    private void begin() {
      if (isStarted) {
        return;
      }
      isStarted = true;
      token.ifPresent(known -> headers.put(AUTHORIZATION, "Bearer " + known));
      super.start(listener, headers);
      if (requestedCount > 0) {
        super.request(requestedCount);
      }
    }
  }

  /** Of the streaming calls Stream alone is: the others have no end, or tell how far they are. */
  private static boolean isBounded(MethodDescriptor<?, ?> method) {
    return method.getType().serverSendsOneMessage()
        || method.getFullMethodName().equals(InferenceServiceGrpc.getStreamMethod().getFullMethodName());
  }
}
