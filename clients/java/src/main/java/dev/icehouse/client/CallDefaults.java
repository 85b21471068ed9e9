package dev.icehouse.client;

import dev.icehouse.v1.CacheServiceGrpc;
import dev.icehouse.v1.InferenceServiceGrpc;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.Context;
import io.grpc.Deadline;
import io.grpc.ForwardingClientCall;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import java.time.Duration;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.TimeUnit;

/** Gives every call its token, its prefix key, its retries, and the deadline of its context or a default one. */
final class CallDefaults implements ClientInterceptor {
  private static final Set<String> COMMANDS =
      Set.of(
          CacheServiceGrpc.getWarmMethod().getFullMethodName(),
          CacheServiceGrpc.getEvictMethod().getFullMethodName(),
          CacheServiceGrpc.getEvictAllMethod().getFullMethodName(),
          CacheServiceGrpc.getVerifyMethod().getFullMethodName(),
          CacheServiceGrpc.getExportMethod().getFullMethodName(),
          CacheServiceGrpc.getImportMethod().getFullMethodName());

  private final Optional<Duration> timeout;
  private final Optional<Duration> commandTimeout;
  private final Optional<BearerToken> token;
  private final RetryPolicy retries;

  CallDefaults(
      Optional<Duration> timeout, Optional<Duration> commandTimeout, Optional<BearerToken> token, RetryPolicy retries) {
    this.timeout = timeout;
    this.commandTimeout = commandTimeout;
    this.token = token;
    this.retries = retries;
  }

  @Override
  public <I, O> ClientCall<I, O> interceptCall(
      MethodDescriptor<I, O> method, CallOptions options, Channel next) {
    CallOptions bounded = bounded(method, options);
    if (method.getType() == MethodDescriptor.MethodType.CLIENT_STREAMING) {
      return new Upload<>(next.newCall(method, bounded));
    }
    var deadline = Optional.ofNullable(bounded.getDeadline());
    var terms = new PromptedCall.Terms(token, retries.limitOf(method), deadline);
    return new PromptedCall<>(() -> next.newCall(method, bounded), terms);
  }

  /** A call of many requests, with the token. It is made once: what was sent is not kept. */
  private final class Upload<I, O> extends ForwardingClientCall.SimpleForwardingClientCall<I, O> {
    Upload(ClientCall<I, O> call) {
      super(call);
    }

    @Override
    public void start(Listener<O> listener, Metadata headers) {
      if (!headers.containsKey(PromptedCall.AUTHORIZATION)) {
        token.ifPresent(known -> headers.put(PromptedCall.AUTHORIZATION, "Bearer " + known.current()));
      }
      super.start(listener, headers);
    }
  }

  private CallOptions bounded(MethodDescriptor<?, ?> method, CallOptions options) {
    CallOptions own = withDefault(method, options);
    Deadline outer = Context.current().getDeadline();
    boolean isFirst = outer != null && (own.getDeadline() == null || outer.isBefore(own.getDeadline()));
    return isFirst ? own.withDeadline(outer) : own;
  }

  private CallOptions withDefault(MethodDescriptor<?, ?> method, CallOptions options) {
    if (options.getDeadline() != null) {
      return options;
    }
    return timeoutOf(method)
        .map(limit -> options.withDeadlineAfter(limit.toNanos(), TimeUnit.NANOSECONDS))
        .orElse(options);
  }

  private Optional<Duration> timeoutOf(MethodDescriptor<?, ?> method) {
    if (COMMANDS.contains(method.getFullMethodName())) {
      return commandTimeout;
    }
    // WatchStats has no end.
    boolean isStream = method.getFullMethodName().equals(InferenceServiceGrpc.getStreamMethod().getFullMethodName());
    return isStream || method.getType().serverSendsOneMessage() ? timeout : Optional.empty();
  }
}
