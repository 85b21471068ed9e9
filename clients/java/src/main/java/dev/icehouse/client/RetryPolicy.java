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
 * Which calls are sent again that the server refuses for now: RESOURCE_EXHAUSTED with a RetryInfo, of which nothing
 * has run.
 */
final class RetryPolicy {
  /** A delay is made longer by up to this share, so that those who were refused together come one by one. */
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

  /** Returns how often a call is sent again at most. */
  int limitOf(MethodDescriptor<?, ?> method) {
    return RETRIED.contains(method.getFullMethodName()) ? limit : 0;
  }

  /** Returns how long to wait before a refused call is sent again; empty where that makes no sense. */
  static Optional<Duration> delayAfter(IcehouseException refusal) {
    if (refusal.code() != Status.Code.RESOURCE_EXHAUSTED) {
      return Optional.empty();
    }
    double share = 1 + SPREAD * ThreadLocalRandom.current().nextDouble();
    return refusal.retryAfter().map(delay -> Duration.ofNanos((long) (delay.toNanos() * share)));
  }
}
