package dev.icehouse.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.Any;
import com.google.protobuf.util.Durations;
import com.google.rpc.RetryInfo;
import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.GenerateResponse;
import dev.icehouse.v1.Prompt;
import dev.icehouse.v1.StreamResponse;
import dev.icehouse.v1.WarmRequest;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.Context;
import io.grpc.ForwardingClientCall.SimpleForwardingClientCall;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.health.v1.HealthCheckResponse.ServingStatus;
import io.grpc.protobuf.StatusProto;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

/** What is sent again, and what is not. */
@Timeout(60)
class RetriesTest {
  private static final Prompt PROMPT = Prompt.newBuilder().setText("Once upon a time").build();
  private static final GenerateRequest REQUEST = GenerateRequest.newBuilder().setPrompt(PROMPT).build();

  /** A refusal that says when to come back. */
  static StatusRuntimeException notNow(Status.Code code, Duration delay) {
    var retry = RetryInfo.newBuilder().setRetryDelay(Durations.fromNanos(delay.toNanos()));
    var refusal = com.google.rpc.Status.newBuilder().setCode(code.value()).addDetails(Any.pack(retry.build()));
    return StatusProto.toStatusRuntimeException(refusal.build());
  }

  @Test
  void whatIsRefusedForNowIsSentAgain() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.SERVING);
        var client = server.client().retryLimit(2).build()) {
      server.refusals.add(notNow(Status.Code.RESOURCE_EXHAUSTED, Duration.ZERO));
      server.refusals.add(notNow(Status.Code.RESOURCE_EXHAUSTED, Duration.ofMillis(1)));
      assertEquals("done", client.generate(REQUEST).getText());
      assertEquals(3, server.generateCount.get());
    }
  }

  @ParameterizedTest(name = "{0}")
  @CsvSource({
    "nobody asked for it, 0, RESOURCE_EXHAUSTED, PT0S, 1",
    "as often as was asked, 3, RESOURCE_EXHAUSTED, PT0S, 4",
    "the server does not say when, 3, RESOURCE_EXHAUSTED, , 1",
    "it will never do, 3, INVALID_ARGUMENT, PT0S, 1",
    "the deadline comes first, 3, RESOURCE_EXHAUSTED, PT1H, 1",
  })
  void nothingElseIs(String about, int limit, Status.Code code, Duration delay, int count) throws Exception {
    var refusal = delay == null ? code.toStatus().asRuntimeException() : notNow(code, delay);
    try (var server = new ScriptedServer(ServingStatus.SERVING);
        var client = server.client().retryLimit(limit).build()) {
      server.refusals.addAll(Collections.nCopies(9, refusal));
      assertEquals(code, assertThrows(IcehouseException.class, () -> client.generate(REQUEST)).code());
      assertEquals(count, server.generateCount.get());
      try (var stream = client.stream(REQUEST)) {
        assertEquals(code, assertThrows(IcehouseException.class, stream.iterator()::hasNext).code());
      }
      assertEquals(1, server.streamCount.get());
    }
  }

  @Test
  void aDeadlineOfTheContextBoundsTheWaitingToo() throws Exception {
    var timer = Executors.newSingleThreadScheduledExecutor();
    try (var server = new ScriptedServer(ServingStatus.SERVING);
        var client = server.client().retryLimit(1).withoutTimeout().build();
        var context = Context.current().withDeadlineAfter(50, TimeUnit.SECONDS, timer)) {
      server.refusals.add(notNow(Status.Code.RESOURCE_EXHAUSTED, Duration.ofHours(1)));
      var error = assertThrows(IcehouseException.class, () -> context.call(() -> client.generate(REQUEST)));
      assertEquals(Status.Code.RESOURCE_EXHAUSTED, error.code());
    } finally {
      timer.shutdownNow();
    }
  }

  @Test
  void aCancelledContextEndsTheWaiting() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.SERVING);
        var client = server.client().retryLimit(1).withoutTimeout().build();
        var context = Context.current().withCancellation()) {
      server.refusals.add(notNow(Status.Code.RESOURCE_EXHAUSTED, Duration.ofHours(1)));
      var call =
          CompletableFuture.supplyAsync(
              () ->
                  assertThrows(IcehouseException.class, () -> context.call(() -> client.generate(REQUEST))));
      while (server.generateCount.get() == 0) {
        Thread.onSpinWait();
      }
      context.cancel(null);
      assertEquals(Status.Code.CANCELLED, call.get().code());
    }
  }

  @Test
  void aDeadlineOfTheContextEndsARunningCall() throws Exception {
    var timer = Executors.newSingleThreadScheduledExecutor();
    try (var server = new ScriptedServer(ServingStatus.SERVING);
        var client = server.client().build();
        var context = Context.current().withDeadlineAfter(500, TimeUnit.MILLISECONDS, timer)) {
      // A stream of which the reader takes nothing has no end of its own.
      server.events.addAll(Collections.nCopies(100_000, StreamResponse.getDefaultInstance()));
      var stream = context.call(() -> client.stream(REQUEST));
      while (!context.isCancelled()) {
        Thread.onSpinWait();
      }
      var error = assertThrows(IcehouseException.class, () -> stream.iterator().forEachRemaining(piece -> {}));
      assertEquals(Status.Code.DEADLINE_EXCEEDED, error.code());
      assertTrue(server.hasDeadline);
    } finally {
      timer.shutdownNow();
    }
  }

  /** In what context gRPC works for a call it checks the connection's health too, which is of all calls. */
  @Test
  void theEndOfOneCallsContextIsNotThatOfTheConnections() throws Exception {
    var key = Context.<String>key("trace");
    var seen = new ArrayList<Context>();
    var observer =
        new ClientInterceptor() {
          @Override
          public <I, O> ClientCall<I, O> interceptCall(
              MethodDescriptor<I, O> method, CallOptions options, Channel next) {
            seen.add(Context.current());
            return new SimpleForwardingClientCall<>(next.newCall(method, options)) {
              @Override
              public void start(Listener<O> listener, Metadata headers) {
                seen.add(Context.current());
                super.start(listener, headers);
              }

              @Override
              public void sendMessage(I message) {
                seen.add(Context.current());
                super.sendMessage(message);
              }
            };
          }
        };
    try (var server = new ScriptedServer(ServingStatus.SERVING);
        var client = server.client().intercept(observer).build()) {
      var context = Context.current().withValue(key, "a").withCancellation();
      context.call(() -> client.generate(REQUEST));
      context.cancel(null);
      try (var stream = Context.current().withValue(key, "b").call(() -> client.stream(REQUEST))) {
        stream.iterator().hasNext();
      }
      assertEquals(List.of("a", "a", "a", "b", "b", "b"), seen.stream().map(key::get).toList());
      assertEquals(List.of(), seen.stream().filter(Context::isCancelled).toList());
    }
  }

  @Test
  void anInterruptEndsTheWaiting() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.SERVING);
        var client = server.client().retryLimit(1).withoutTimeout().build()) {
      server.refusals.add(notNow(Status.Code.RESOURCE_EXHAUSTED, Duration.ofHours(1)));
      var code = new CompletableFuture<Status.Code>();
      var thread =
          new Thread(
              () -> code.complete(assertThrows(IcehouseException.class, () -> client.generate(REQUEST)).code()));
      thread.start();
      while (server.generateCount.get() == 0) {
        Thread.onSpinWait();
      }
      thread.interrupt();
      assertEquals(Status.Code.CANCELLED, code.get());
    }
  }

  @Test
  void aRefusalThatComesAfterACancelIsNotHeard() {
    var ends = new ArrayList<Status.Code>();
    var attempts = new ArrayList<DeafCall>();
    var call =
        new PromptedCall<GenerateRequest, GenerateResponse>(
            () -> {
              attempts.add(new DeafCall(attempts.isEmpty()));
              return attempts.get(attempts.size() - 1);
            },
            new PromptedCall.Terms(Optional.empty(), 1, Optional.empty()));
    call.start(
        new ClientCall.Listener<>() {
          @Override
          public void onClose(Status status, Metadata trailers) {
            ends.add(status.getCode());
          }
        },
        new Metadata());
    call.sendMessage(REQUEST);
    call.cancel("the caller has left", null);
    var refusal = notNow(Status.Code.RESOURCE_EXHAUSTED, Duration.ofHours(1));
    attempts.get(0).listener.onClose(refusal.getStatus(), refusal.getTrailers());
    assertEquals(List.of(Status.Code.CANCELLED), ends);
  }

  /** A call of which the answer is on its way already when it is cancelled; or one that hears of that. */
  private static final class DeafCall extends ClientCall<GenerateRequest, GenerateResponse> {
    private final boolean isDeaf;
    private Listener<GenerateResponse> listener;

    DeafCall(boolean isDeaf) {
      this.isDeaf = isDeaf;
    }

    @Override
    public void start(Listener<GenerateResponse> listener, Metadata headers) {
      this.listener = listener;
    }

    @Override
    public void request(int count) {}

    @Override
    public void halfClose() {}

    @Override
    public void sendMessage(GenerateRequest request) {}

    @Override
    public void cancel(String reason, Throwable cause) {
      if (!isDeaf) {
        listener.onClose(Status.CANCELLED, new Metadata());
      }
    }
  }

  @Test
  void aCommandIsNotSentAgain() throws Exception {
    var warm = WarmRequest.newBuilder().setPrompt(PROMPT).build();
    try (var server = new ScriptedServer(ServingStatus.SERVING);
        var client = server.client().retryLimit(2).build()) {
      server.refusals.add(notNow(Status.Code.RESOURCE_EXHAUSTED, Duration.ZERO));
      assertEquals(
          Status.Code.RESOURCE_EXHAUSTED,
          assertThrows(IcehouseException.class, () -> client.cache().warm(warm)).code());
    }
  }

  @Test
  void aLimitIsNoNegativeNumber() {
    assertThrows(IllegalArgumentException.class, () -> IcehouseClient.to("127.0.0.1:1").retryLimit(-1));
  }

  @Test
  void anAddressIsNotEmpty() {
    for (String address : List.of("", " ")) {
      var refused = assertThrows(IllegalArgumentException.class, () -> IcehouseClient.connect(address));
      assertTrue(refused.getMessage().contains("must be host:port"), refused.getMessage());
    }
  }
}
