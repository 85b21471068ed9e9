package dev.icehouse.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertIterableEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.util.Durations;
import com.google.protobuf.util.Timestamps;
import dev.icehouse.v1.BlockMatch;
import dev.icehouse.v1.CacheTier;
import dev.icehouse.v1.EvictRequest;
import dev.icehouse.v1.ExplainRequest;
import dev.icehouse.v1.ExplainResponse;
import dev.icehouse.v1.PinRequest;
import dev.icehouse.v1.PinResponse;
import dev.icehouse.v1.Started;
import dev.icehouse.v1.StreamResponse;
import dev.icehouse.v1.UnpinRequest;
import dev.icehouse.v1.VerifyRequest;
import dev.icehouse.v1.VerifyResult;
import dev.icehouse.v1.WarmProgress;
import dev.icehouse.v1.WarmRequest;
import dev.icehouse.v1.WarmResult;
import dev.icehouse.v1.WatchStatsResponse;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.TreeSet;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;
import org.junit.jupiter.api.extension.ExtendWith;

/** The scenarios of clients/scenarios.json that are about the cache; see {@link ScenariosTest}. */
@EnabledIfEnvironmentVariable(named = Servers.VARIABLE, matches = ".+")
@ExtendWith(Scenario.Runner.class)
@Timeout(120)
class CacheScenariosTest {
  @Test
  void cacheReport(Scenario s) {
    var client = s.client();
    var request = s.request().setCache(s.tenant()).build();
    int cachedTokens = client.generate(request).getCache().getCachedTokens();
    assertEquals(s.expect("first_cached_tokens").getAsInt(), cachedTokens);
    try (var stream = client.stream(request)) {
      StreamResponse first = stream.events().next();
      assertTrue(first.hasStarted());
      Started started = first.getStarted();
      int uncachedTokens = started.getPromptTokens() - started.getCache().getRamTokens();
      int limit = s.expect("uncached_tokens_limit").getAsInt();
      assertTrue(uncachedTokens > 0 && uncachedTokens <= limit, started.toString());
    }
  }

  @Test
  void warm(Scenario s) {
    var steps = new ArrayList<WarmProgress>();
    var request = WarmRequest.newBuilder().setPrompt(s.prompt()).setCache(s.tenant()).build();
    WarmResult answer = s.client().cache().warm(request, steps::add);
    assertEquals(s.expect("output_tokens").getAsInt(), answer.getUsage().getOutputTokens());
    WarmProgress last = steps.get(steps.size() - 1);
    assertEquals(answer.getUsage().getPromptTokens(), last.getPromptTokens());
    int unprocessedTokens = last.getPromptTokens() - last.getProcessedTokens();
    int limit = s.expect("unprocessed_tokens_limit").getAsInt();
    assertTrue(unprocessedTokens >= 0 && unprocessedTokens <= limit, last.toString());
  }

  @Test
  void explain(Scenario s) {
    var cache = s.client().cache();
    assertEquals(s.expect("first_cached_tokens").getAsInt(), explain(cache, s).getCache().getCachedTokens());
    warm(cache, s);
    ExplainResponse known = explain(cache, s);
    int ramTokens = known.getCache().getRamTokens();
    int limit = s.expect("uncached_tokens_limit").getAsInt();
    assertTrue(known.getPromptTokens() - ramTokens <= limit, known.toString());
    assertTrue(known.getBlocksList().stream().allMatch(block -> block.getTier() == CacheTier.CACHE_TIER_RAM));
    assertEquals(ramTokens, tokenCount(known.getBlocksList()));
  }

  @Test
  void pin(Scenario s) {
    var cache = s.client().cache();
    warm(cache, s);
    var ttl = Durations.fromSeconds(s.input("ttl_s").getAsLong());
    PinResponse pinned = cache.pin(pinRequest(s).setTtl(ttl).build());
    List<BlockMatch> blocks = explain(cache, s).getBlocksList();
    assertTrue(pinned.getBlockCount() > 0);
    assertEquals(Collections.nCopies(pinned.getBlockCount(), true), pins(blocks));
    assertEquals(tokenCount(blocks), pinned.getTokenCount());
  }

  @Test
  void unpin(Scenario s) {
    var cache = s.client().cache();
    warm(cache, s);
    int blockCount = cache.pin(pinRequest(s).build()).getBlockCount();
    var request = UnpinRequest.newBuilder().setPrompt(s.prompt()).setCache(s.tenant()).build();
    assertTrue(blockCount > 0);
    assertEquals(blockCount, cache.unpin(request).getBlockCount());
    assertEquals(Collections.nCopies(blockCount, false), pins(explain(cache, s).getBlocksList()));
  }

  @Test
  void evict(Scenario s) {
    var cache = s.client().cache();
    warm(cache, s);
    long blockCount = explain(cache, s).getBlocksCount();
    var steps = new ArrayList<Long>();
    var request = EvictRequest.newBuilder().setPrompt(s.prompt()).setCache(s.tenant()).build();
    var evicted = cache.evict(request, step -> steps.add(step.getProcessedBlockCount()));
    assertTrue(blockCount > 0);
    assertEquals(blockCount, evicted.getRamBlockCount());
    assertEquals(blockCount, steps.get(steps.size() - 1));
    assertEquals(s.expect("cached_tokens").getAsInt(), explain(cache, s).getCache().getCachedTokens());
  }

  @Test
  void verify(Scenario s) {
    var steps = new ArrayList<Long>();
    VerifyResult answer =
        s.client()
            .cache()
            .verify(VerifyRequest.getDefaultInstance(), step -> steps.add(step.getVerifiedBlockCount()));
    assertEquals(s.expect("damaged_block_count").getAsLong(), answer.getDamagedBlockCount());
    assertEquals(steps.stream().sorted().toList(), steps);
    assertEquals(answer.getVerifiedBlockCount(), steps.get(steps.size() - 1));
  }

  @Test
  void watchStats(Scenario s) {
    int count = s.input("answer_count").getAsInt();
    var times = new ArrayList<Long>();
    try (var answers = s.client().watchStats(Duration.ofMillis(s.input("interval_ms").getAsLong()))) {
      for (WatchStatsResponse answer : answers) {
        times.add(Timestamps.toNanos(answer.getStats().getCollectTime()));
        if (times.size() == count) {
          break;
        }
      }
    }
    assertEquals(count, times.size());
    assertIterableEquals(new TreeSet<>(times), times);
  }

  private static void warm(CacheClient cache, Scenario s) {
    cache.warm(WarmRequest.newBuilder().setPrompt(s.prompt()).setCache(s.tenant()).build());
  }

  private static ExplainResponse explain(CacheClient cache, Scenario s) {
    return cache.explain(ExplainRequest.newBuilder().setPrompt(s.prompt()).setCache(s.tenant()).build());
  }

  private static PinRequest.Builder pinRequest(Scenario s) {
    return PinRequest.newBuilder().setPrompt(s.prompt()).setCache(s.tenant());
  }

  private static int tokenCount(List<BlockMatch> blocks) {
    return blocks.stream().mapToInt(BlockMatch::getTokenCount).sum();
  }

  private static List<Boolean> pins(List<BlockMatch> blocks) {
    return blocks.stream().map(BlockMatch::getPinned).toList();
  }
}
