package dev.icehouse.client;

import dev.icehouse.v1.EmbeddingServiceGrpc;
import dev.icehouse.v1.InferenceServiceGrpc;
import dev.icehouse.v1.RerankServiceGrpc;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import java.time.Duration;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.ThreadLocalRandom;

/**
 * Decides which calls are sent again when the server refuses them for now: RESOURCE_EXHAUSTED with a RetryInfo, which
 * means that nothing has run.
 */
final class RetryPolicy {
  /** A delay is extended by up to this share, so that callers who were refused together do not return together. */
  private static final double SPREAD = 0.25;

  private static final Set<String> RETRIED =
      Set.of(
          InferenceServiceGrpc.getGenerateMethod().getFullMethodName(),
          EmbeddingServiceGrpc.getEmbedMethod().getFullMethodName(),
          RerankServiceGrpc.getRerankMethod().getFullMethodName());

  private final int limit;

  RetryPolicy(int limit) {
    this.limit = limit;
  }

  /** Returns the maximum number of retries of a call. */
  int limitOf(MethodDescriptor<?, ?> method) {
    return RETRIED.contains(method.getFullMethodName()) ? limit : 0;
  }

  /** Returns the time to wait before a refused call is sent again; empty if it should not be. */
  static Optional<Duration> delayAfter(IcehouseException refusal) {
    if (refusal.code() != Status.Code.RESOURCE_EXHAUSTED) {
      return Optional.empty();
    }
    double share = 1 + SPREAD * ThreadLocalRandom.current().nextDouble();
    return refusal.retryAfter().map(delay -> Duration.ofNanos((long) (delay.toNanos() * share)));
  }
}
