package dev.icehouse.client;

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
import java.util.concurrent.TimeUnit;

/** Gives every call the token, and a deadline where it has none. */
final class CallDefaults implements ClientInterceptor {
  private static final Metadata.Key<String> AUTHORIZATION =
      Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);

  private final Optional<Duration> timeout;
  private final Optional<String> token;

  CallDefaults(Optional<Duration> timeout, Optional<String> token) {
    this.timeout = timeout;
    this.token = token;
  }

  @Override
  public <I, O> ClientCall<I, O> interceptCall(
      MethodDescriptor<I, O> method, CallOptions options, Channel next) {
    CallOptions bounded = options;
    if (timeout.isPresent() && options.getDeadline() == null && hasAnEnd(method)) {
      bounded = options.withDeadlineAfter(timeout.get().toNanos(), TimeUnit.NANOSECONDS);
    }
    return new SimpleForwardingClientCall<>(next.newCall(method, bounded)) {
      @Override
      public void start(Listener<O> listener, Metadata headers) {
        token.ifPresent(known -> headers.put(AUTHORIZATION, "Bearer " + known));
        super.start(listener, headers);
      }
    };
  }

  /** Of the streaming calls Stream alone ends by itself. */
  private static boolean hasAnEnd(MethodDescriptor<?, ?> method) {
    return method.getType().serverSendsOneMessage()
        || method.getFullMethodName().equals(InferenceServiceGrpc.getStreamMethod().getFullMethodName());
  }
}
