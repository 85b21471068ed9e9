package dev.icehouse.client;

import dev.icehouse.v1.CacheServiceGrpc;
import dev.icehouse.v1.InferenceServiceGrpc;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.Context;
import io.grpc.Deadline;
import io.grpc.MethodDescriptor;
import java.time.Duration;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.TimeUnit;

/** Gives every call the token, the prefix key of its request, its retries, and the deadline of its context or a default. */
final class CallDefaults implements ClientInterceptor {
  private static final Set<String> ORDERS =
      Set.of(
          CacheServiceGrpc.getWarmMethod().getFullMethodName(),
          CacheServiceGrpc.getEvictMethod().getFullMethodName(),
          CacheServiceGrpc.getVerifyMethod().getFullMethodName());

  private final Optional<Duration> timeout;
  private final Optional<Duration> orderTimeout;
  private final Optional<BearerToken> token;
  private final RetryPolicy retries;

  CallDefaults(
      Optional<Duration> timeout, Optional<Duration> orderTimeout, Optional<BearerToken> token, RetryPolicy retries) {
    this.timeout = timeout;
    this.orderTimeout = orderTimeout;
    this.token = token;
    this.retries = retries;
  }

  @Override
  public <I, O> ClientCall<I, O> interceptCall(
      MethodDescriptor<I, O> method, CallOptions options, Channel next) {
    CallOptions bounded = bounded(method, options);
    var deadline = Optional.ofNullable(bounded.getDeadline());
    var terms = new PromptedCall.Terms(token, retries.limitOf(method), deadline);
    return new PromptedCall<>(() -> next.newCall(method, bounded), terms);
  }

  private CallOptions bounded(MethodDescriptor<?, ?> method, CallOptions options) {
    CallOptions own = withDefault(method, options);
    Deadline outer = Context.current().getDeadline();
    boolean isFirst = outer != null && (own.getDeadline() == null || outer.isBefore(own.getDeadline()));
    return isFirst ? own.withDeadline(outer) : own;
  }

  private CallOptions withDefault(MethodDescriptor<?, ?> method, CallOptions options) {
    Optional<Duration> limit = ORDERS.contains(method.getFullMethodName()) ? orderTimeout : timeout;
    if (limit.isEmpty() || options.getDeadline() != null || !isBounded(method)) {
      return options;
    }
    return options.withDeadlineAfter(limit.get().toNanos(), TimeUnit.NANOSECONDS);
  }

  /** Of the streaming calls Stream alone is: the others have no end, or tell how far they are. */
  private static boolean isBounded(MethodDescriptor<?, ?> method) {
    return method.getType().serverSendsOneMessage()
        || method.getFullMethodName().equals(InferenceServiceGrpc.getStreamMethod().getFullMethodName());
  }
}
