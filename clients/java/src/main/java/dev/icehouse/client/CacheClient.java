package dev.icehouse.client;

import static dev.icehouse.client.IcehouseException.translated;

import com.google.protobuf.Duration;
import dev.icehouse.v1.CacheServiceGrpc;
import dev.icehouse.v1.CacheServiceGrpc.CacheServiceBlockingStub;
import dev.icehouse.v1.EvictProgress;
import dev.icehouse.v1.EvictRequest;
import dev.icehouse.v1.EvictResponse;
import dev.icehouse.v1.EvictWithProgressResponse;
import dev.icehouse.v1.ExplainRequest;
import dev.icehouse.v1.ExplainResponse;
import dev.icehouse.v1.PinRequest;
import dev.icehouse.v1.PinResponse;
import dev.icehouse.v1.PrefillProgress;
import dev.icehouse.v1.UnpinRequest;
import dev.icehouse.v1.UnpinResponse;
import dev.icehouse.v1.VerifyProgress;
import dev.icehouse.v1.VerifyRequest;
import dev.icehouse.v1.VerifyResponse;
import dev.icehouse.v1.VerifyWithProgressResponse;
import dev.icehouse.v1.WarmRequest;
import dev.icehouse.v1.WarmResponse;
import dev.icehouse.v1.WarmWithProgressResponse;
import dev.icehouse.v1.WatchStatsRequest;
import dev.icehouse.v1.WatchStatsResponse;
import io.grpc.Channel;
import java.util.function.Consumer;

/**
 * Looks into the prefix cache and gives it orders: {@link IcehouseClient#cache}. Behind a load balancer an order
 * reaches the server that a generate of the same prompt reaches. With a progress consumer an order has no
 * deadline, and what the consumer throws ends it.
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

  /** Computes a prompt and keeps it, without generating. */
  public WarmResponse warm(WarmRequest request) {
    return translated(() -> cache.warm(request));
  }

  /** As {@link #warm(WarmRequest)}, and tells how far it is. */
  public WarmResponse warm(WarmRequest request, Consumer<PrefillProgress> onProgress) {
    try (var responses = new ResponseStream<>(() -> cache.warmWithProgress(request))) {
      WarmResponse finished = null;
      for (WarmWithProgressResponse response : responses) {
        if (response.hasPrefillProgress()) {
          onProgress.accept(response.getPrefillProgress());
        } else if (response.hasFinished()) {
          finished = response.getFinished();
        }
      }
      return present(finished);
    }
  }

  /** Keeps a prompt's known blocks from being evicted by policy. */
  public PinResponse pin(PinRequest request) {
    return translated(() -> cache.pin(request));
  }

  /** Takes a prompt's pins off. */
  public UnpinResponse unpin(UnpinRequest request) {
    return translated(() -> cache.unpin(request));
  }

  /** Removes a prompt's known blocks, pinned ones too; with {@code all}, for operators, those of the model. */
  public EvictResponse evict(EvictRequest request) {
    return translated(() -> cache.evict(request));
  }

  /** As {@link #evict(EvictRequest)}, and tells how far it is; it goes no further once the call ends. */
  public EvictResponse evict(EvictRequest request, Consumer<EvictProgress> onProgress) {
    try (var responses = new ResponseStream<>(() -> cache.evictWithProgress(request))) {
      EvictResponse finished = null;
      for (EvictWithProgressResponse response : responses) {
        if (response.hasProgress()) {
          onProgress.accept(response.getProgress());
        } else if (response.hasFinished()) {
          finished = response.getFinished();
        }
      }
      return present(finished);
    }
  }

  /** Has blocks on SSD read and compared, for operators. */
  public VerifyResponse verify(VerifyRequest request) {
    return translated(() -> cache.verify(request));
  }

  /** As {@link #verify(VerifyRequest)}, and tells how far it is. */
  public VerifyResponse verify(VerifyRequest request, Consumer<VerifyProgress> onProgress) {
    try (var responses = new ResponseStream<>(() -> cache.verifyWithProgress(request))) {
      VerifyResponse finished = null;
      for (VerifyWithProgressResponse response : responses) {
        if (response.hasProgress()) {
          onProgress.accept(response.getProgress());
        } else if (response.hasFinished()) {
          finished = response.getFinished();
        }
      }
      return present(finished);
    }
  }

  /** Begins to send the server's counters, at once and then at an interval of 0.1 s to 1 h. */
  public ResponseStream<WatchStatsResponse> watchStats(java.time.Duration interval) {
    var apart = Duration.newBuilder().setSeconds(interval.getSeconds()).setNanos(interval.getNano());
    var request = WatchStatsRequest.newBuilder().setInterval(apart).build();
    return new ResponseStream<>(() -> cache.watchStats(request));
  }

  private static <T> T present(T finished) {
    if (finished == null) {
      throw new IllegalStateException("the server ended the call without its result");
    }
    return finished;
  }
}
