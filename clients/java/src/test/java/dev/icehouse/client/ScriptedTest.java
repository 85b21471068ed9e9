package dev.icehouse.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.Any;
import com.google.protobuf.Duration;
import com.google.rpc.Code;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import dev.icehouse.v1.CacheServiceGrpc;
import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.Prompt;
import dev.icehouse.v1.ServerState;
import dev.icehouse.v1.WarmProgress;
import dev.icehouse.v1.WarmRequest;
import dev.icehouse.v1.WarmResponse;
import io.grpc.CallOptions;
import io.grpc.ClientCall;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.health.v1.HealthCheckResponse.ServingStatus;
import io.grpc.protobuf.StatusProto;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;

/** What a real server cannot be made to do. */
class ScriptedTest {
  private static final Prompt PROMPT = Prompt.newBuilder().setText("Once upon a time").build();
  private static final GenerateRequest REQUEST = GenerateRequest.newBuilder().setPrompt(PROMPT).build();
  private static final WarmRequest WARM = WarmRequest.newBuilder().setPrompt(PROMPT).build();

  private static StatusRuntimeException unavailable() {
    return Status.UNAVAILABLE.withDescription("draining").asRuntimeException();
  }

  private static void drain(IcehouseClient client) {
    try (TextStream stream = client.stream(REQUEST)) {
      stream.iterator().forEachRemaining(text -> {});
    }
  }

  @Test
  void generateIsRetriedWhileUnavailable() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.SERVING); var client = server.client().build()) {
      server.refusals.add(unavailable());
      server.refusals.add(unavailable());
      assertEquals("done", client.generate(REQUEST).getText());
      assertEquals(3, server.generateCount.get());
    }
  }

  @Test
  void nothingElseIsRetried() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.SERVING); var client = server.client().build()) {
      server.refusals.add(Status.RESOURCE_EXHAUSTED.asRuntimeException());
      var full = assertThrows(IcehouseException.class, () -> client.generate(REQUEST));
      assertEquals(Status.Code.RESOURCE_EXHAUSTED, full.code());
      server.refusals.add(unavailable());
      var away = assertThrows(IcehouseException.class, () -> drain(client));
      assertEquals("UNAVAILABLE", away.reason());
      assertEquals(1, server.generateCount.get());
      assertEquals(1, server.streamCount.get());
    }
  }

  @Test
  void aRequestIsCancelledOfTheTenantThatIsNamed() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.SERVING); var client = server.client().build()) {
      assertEquals("search", client.cancelRequest("r1", "search").getTenant());
      assertEquals("", client.cancelRequest("r1", "").getTenant());
      assertEquals("nobody", client.cancelRequest("r1").getTenant());
    }
  }

  @Test
  void aServerIsWaitedForUntilItTakesRequests() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.SERVING); var client = server.client().build()) {
      server.refusals.add(unavailable());
      server.states.addAll(List.of(ServerState.SERVER_STATE_LOADING, ServerState.SERVER_STATE_READY));
      var ready = client.waitReady(java.time.Duration.ofMinutes(1));
      assertEquals(ServerState.SERVER_STATE_READY, ready.getState());
      var late =
          assertThrows(IcehouseException.class, () -> client.waitReady(java.time.Duration.ofMillis(150)));
      assertEquals("DEADLINE_EXCEEDED: the server was not ready in time: it is LOADING", late.getMessage());
    }
  }

  @Test
  void whatWaitingCannotHelpIsToldAtOnce() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.SERVING); var client = server.client().build()) {
      server.states.add(ServerState.SERVER_STATE_FAILED);
      var failed = assertThrows(IcehouseException.class, () -> client.waitReady(java.time.Duration.ofMinutes(1)));
      assertEquals(Status.Code.INTERNAL, failed.code());
      assertEquals("ENGINE_FAILED", failed.reason());
      server.refusals.add(Status.UNAUTHENTICATED.asRuntimeException());
      var stranger = assertThrows(IcehouseException.class, () -> client.waitReady(java.time.Duration.ofMinutes(1)));
      assertEquals(Status.Code.UNAUTHENTICATED, stranger.code());
    }
  }

  @Test
  void aServerThatDoesNotServeIsNotCalled() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.NOT_SERVING); var client = server.client().build()) {
      var error = assertThrows(IcehouseException.class, () -> drain(client));
      assertEquals(Status.Code.UNAVAILABLE, error.code());
      assertEquals(0, server.streamCount.get());
    }
  }

  @Test
  void healthCanBeLeftAlone() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.NOT_SERVING);
        var client = server.client().withoutHealthChecks().build()) {
      assertEquals("done", client.generate(REQUEST).getText());
    }
  }

  @Test
  void aRetryDelayIsToldInTheError() throws Exception {
    var info = ErrorInfo.newBuilder().setReason("QUEUE_FULL").putMetadata("waiting", "8").build();
    var delay = Duration.newBuilder().setSeconds(1).setNanos(500_000_000).build();
    var full =
        com.google.rpc.Status.newBuilder()
            .setCode(Code.RESOURCE_EXHAUSTED_VALUE)
            .addDetails(Any.pack(info))
            .addDetails(Any.pack(RetryInfo.newBuilder().setRetryDelay(delay).build()))
            .build();
    try (var server = new ScriptedServer(ServingStatus.SERVING); var client = server.client().build()) {
      server.refusals.add(StatusProto.toStatusRuntimeException(full));
      var error = assertThrows(IcehouseException.class, () -> client.generate(REQUEST));
      assertEquals("QUEUE_FULL", error.reason());
      assertEquals(Map.of("waiting", "8"), error.metadata());
      assertEquals(Optional.of(java.time.Duration.ofMillis(1500)), error.retryAfter());
      assertEquals(Optional.empty(), error.field());
    }
  }

  @Test
  void everyCallHasADeadlineUnlessToldOtherwise() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.SERVING)) {
      try (var client = server.client().build()) {
        client.generate(REQUEST);
        assertTrue(server.hasDeadline);
        server.hasDeadline = false;
        drain(client);
        assertTrue(server.hasDeadline);
      }
      try (var client = server.client().withoutTimeout().build()) {
        client.generate(REQUEST);
        assertFalse(server.hasDeadline);
        client.generate(REQUEST, java.time.Duration.ofSeconds(30));
        assertTrue(server.hasDeadline);
      }
    }
  }

  @Test
  void commandsThatMayTakeMinutesHaveADeadlineOfTheirOwn() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.SERVING)) {
      try (var client = server.client().timeout(java.time.Duration.ofMinutes(30)).build()) {
        client.cache().warm(WARM);
        assertEquals(60, server.remainingMinutes);
        client.cache().warm(WARM, progress -> {});
        assertEquals(60, server.remainingMinutes);
      }
      try (var client = server.client().commandTimeout(java.time.Duration.ofHours(2)).build()) {
        client.cache().warm(WARM);
        assertEquals(120, server.remainingMinutes);
      }
      try (var client = server.client().withoutTimeout().build()) {
        client.cache().warm(WARM);
        assertFalse(server.hasDeadline);
      }
    }
  }

  @Test
  void aCommandReportsItsProgressAndReturnsItsResultOrSaysThatThereWasNone() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.SERVING); var client = server.client().build()) {
      var first = WarmProgress.newBuilder().setProcessedTokens(256).setPromptTokens(300).build();
      var second = WarmProgress.newBuilder().setProcessedTokens(300).setPromptTokens(300).build();
      server.warmEvents.add(0, WarmResponse.newBuilder().setProgress(first).build());
      server.warmEvents.add(1, WarmResponse.newBuilder().setProgress(second).build());
      var steps = new ArrayList<WarmProgress>();
      assertEquals("r1", client.cache().warm(WARM, steps::add).getRequestId());
      assertEquals(List.of(first, second), steps);
      assertEquals("r1", client.cache().warm(WARM).getRequestId());
      server.warmEvents.remove(2);
      var error = assertThrows(IllegalStateException.class, () -> client.cache().warm(WARM));
      assertTrue(error.getMessage().contains("without a result"), error.getMessage());
    }
  }

  @Test
  void whatAConsumerOfProgressThrowsEndsTheCommand() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.SERVING); var client = server.client().build()) {
      server.warmEvents.add(0, WarmResponse.newBuilder().setProgress(WarmProgress.getDefaultInstance()).build());
      assertThrows(
          IndexOutOfBoundsException.class, () -> client.cache().warm(WARM, progress -> List.of("none").get(1)));
    }
  }

  @Test
  void theHeadersGoWithEveryCallThatHasAPrompt() throws Exception {
    var prefixKey = Metadata.Key.of("icehouse-prefix-key", Metadata.ASCII_STRING_MARSHALLER);
    var authorization = Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);
    try (var server = new ScriptedServer(ServingStatus.SERVING);
        var client = server.client().token("secret").build()) {
      client.generate(REQUEST);
      assertEquals(PrefixKey.of(REQUEST).orElseThrow(), server.headers.get(prefixKey));
      assertEquals("Bearer secret", server.headers.get(authorization));
      drain(client);
      assertEquals(1, server.streamCount.get());
      assertEquals(PrefixKey.of(REQUEST).orElseThrow(), server.headers.get(prefixKey));
      assertEquals("Bearer secret", server.headers.get(authorization));
      // Stubs of the caller's own get them too.
      server.headers = new Metadata();
      CacheServiceGrpc.newBlockingStub(client.channel()).warm(WARM).forEachRemaining(event -> {});
      assertEquals(PrefixKey.of(REQUEST).orElseThrow(), server.headers.get(prefixKey));
      assertEquals("Bearer secret", server.headers.get(authorization));
      client.getServer();
      assertNull(server.headers.get(prefixKey));
    }
  }

  @Test
  void aCallThatIsCancelledBeforeItsRequestTellsItsListener() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.SERVING);
        var client = server.client().build()) {
      var call = client.channel().newCall(CacheServiceGrpc.getWarmMethod(), CallOptions.DEFAULT);
      var closed = new CompletableFuture<Status.Code>();
      call.start(
          new ClientCall.Listener<>() {
            @Override
            public void onClose(Status status, Metadata trailers) {
              closed.complete(status.getCode());
            }
          },
          new Metadata());
      call.request(1);
      call.cancel("changed my mind", null);
      assertEquals(Status.Code.CANCELLED, closed.get(10, TimeUnit.SECONDS));
    }
  }

  @Test
  void aStreamCutShortHasNoReply() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.SERVING);
        var client = server.client().build();
        var stream = client.stream(REQUEST)) {
      stream.iterator().forEachRemaining(text -> {});
      assertThrows(IllegalStateException.class, stream::reply);
    }
  }
}
