package dev.icehouse.client;

import static dev.icehouse.client.IcehouseException.translated;

import dev.icehouse.v1.CacheServiceGrpc;
import dev.icehouse.v1.CacheServiceGrpc.CacheServiceBlockingStub;
import dev.icehouse.v1.EvictAllRequest;
import dev.icehouse.v1.EvictProgress;
import dev.icehouse.v1.EvictRequest;
import dev.icehouse.v1.EvictResult;
import dev.icehouse.v1.ExplainRequest;
import dev.icehouse.v1.ExplainResponse;
import dev.icehouse.v1.PinRequest;
import dev.icehouse.v1.PinResponse;
import dev.icehouse.v1.UnpinRequest;
import dev.icehouse.v1.UnpinResponse;
import dev.icehouse.v1.VerifyProgress;
import dev.icehouse.v1.VerifyRequest;
import dev.icehouse.v1.VerifyResult;
import dev.icehouse.v1.WarmProgress;
import dev.icehouse.v1.WarmRequest;
import dev.icehouse.v1.WarmResult;
import io.grpc.Channel;
import java.util.Iterator;
import java.util.Optional;
import java.util.function.Consumer;
import java.util.function.Function;
import java.util.function.Supplier;

/**
 * Inspects and manages the server's prefix cache: {@link IcehouseClient#cache}. Behind a load balancer, a call reaches
 * the server that {@link IcehouseClient#generate} with the same prompt reaches.
 *
 * <p>Warm, evict, evictAll and verify may take minutes. They return their result at the end, and report their progress
 * to a consumer if they are given one. If the consumer throws, the command ends with what it threw.
 */
public final class CacheClient {
  private final CacheServiceBlockingStub cache;

  CacheClient(Channel channel) {
    cache = CacheServiceGrpc.newBlockingStub(channel);
  }

  /** Returns what generate would reuse of a prompt. */
  public ExplainResponse explain(ExplainRequest request) {
    return translated(() -> cache.explain(request));
  }

  /** Computes a prompt and keeps it in the cache, without generating. */
  public WarmResult warm(WarmRequest request) {
    return warm(request, progress -> {});
  }

  /** As {@link #warm(WarmRequest)}, with a consumer of the progress. */
  public WarmResult warm(WarmRequest request, Consumer<WarmProgress> onProgress) {
    return resultOf(
        () -> cache.warm(request),
        event -> {
          if (event.hasProgress()) {
            onProgress.accept(event.getProgress());
          }
          return event.hasDone() ? Optional.of(event.getDone()) : Optional.empty();
        });
  }

  /** Protects the cached blocks of a prompt from eviction by policy. */
  public PinResponse pin(PinRequest request) {
    return translated(() -> cache.pin(request));
  }

  /** Removes the protection of {@link #pin}. */
  public UnpinResponse unpin(UnpinRequest request) {
    return translated(() -> cache.unpin(request));
  }

  /** Removes the cached blocks of a prompt, including pinned ones. What was removed before the call ends is gone. */
  public EvictResult evict(EvictRequest request) {
    return evict(request, progress -> {});
  }

  /** As {@link #evict(EvictRequest)}, with a consumer of the progress. */
  public EvictResult evict(EvictRequest request, Consumer<EvictProgress> onProgress) {
    return resultOf(
        () -> cache.evict(request),
        event -> {
          if (event.hasProgress()) {
            onProgress.accept(event.getProgress());
          }
          return event.hasDone() ? Optional.of(event.getDone()) : Optional.empty();
        });
  }

  /** Removes all blocks of a model, of every tenant. Only for operators. */
  public EvictResult evictAll(EvictAllRequest request) {
    return evictAll(request, progress -> {});
  }

  /** As {@link #evictAll(EvictAllRequest)}, with a consumer of the progress. */
  public EvictResult evictAll(EvictAllRequest request, Consumer<EvictProgress> onProgress) {
    return resultOf(
        () -> cache.evictAll(request),
        event -> {
          if (event.hasProgress()) {
            onProgress.accept(event.getProgress());
          }
          return event.hasDone() ? Optional.of(event.getDone()) : Optional.empty();
        });
  }

  /** Reads blocks on SSD and compares their checksums. Only for operators. */
  public VerifyResult verify(VerifyRequest request) {
    return verify(request, progress -> {});
  }

  /** As {@link #verify(VerifyRequest)}, with a consumer of the progress. */
  public VerifyResult verify(VerifyRequest request, Consumer<VerifyProgress> onProgress) {
    return resultOf(
        () -> cache.verify(request),
        event -> {
          if (event.hasProgress()) {
            onProgress.accept(event.getProgress());
          }
          return event.hasDone() ? Optional.of(event.getDone()) : Optional.empty();
        });
  }

  /** Returns what {@code read} finds in the last event. It is called with each event, and handles their progress. */
  private static <E, R> R resultOf(Supplier<Iterator<E>> call, Function<E, Optional<R>> read) {
    Optional<R> result = Optional.empty();
    try (var events = new ResponseStream<>(call)) {
      for (E event : events) {
        result = read.apply(event);
      }
    }
    return result.orElseThrow(() -> new IllegalStateException("the server ended the command without a result"));
  }
}
