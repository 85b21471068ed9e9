package dev.icehouse.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.icehouse.v1.Delta;
import dev.icehouse.v1.Finished;
import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.GetServerRequest;
import dev.icehouse.v1.Prompt;
import dev.icehouse.v1.ServerServiceGrpc;
import dev.icehouse.v1.ServerState;
import dev.icehouse.v1.Started;
import dev.icehouse.v1.StreamResponse;
import io.grpc.Status;
import io.grpc.health.v1.HealthCheckResponse.ServingStatus;
import java.time.Duration;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.CancellationException;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Flow;
import java.util.concurrent.Future;
import java.util.concurrent.LinkedBlockingQueue;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** Futures and publishers against a scripted server. */
@Timeout(60)
class AsyncClientTest {
  private static final Prompt PROMPT = Prompt.newBuilder().setText("Once upon a time").build();
  private static final GenerateRequest REQUEST = GenerateRequest.newBuilder().setPrompt(PROMPT).build();
  private static final int LARGE_BYTES = 1 << 20;

  /** Writes down what it is told; requests nothing by itself. */
  private static final class Reader<T> implements Flow.Subscriber<T> {
    private final LinkedBlockingQueue<T> items = new LinkedBlockingQueue<>();
    private final LinkedBlockingQueue<Object> end = new LinkedBlockingQueue<>();
    private Flow.Subscription subscription;

    @Override
    public void onSubscribe(Flow.Subscription subscription) {
      this.subscription = subscription;
    }

    @Override
    public void onNext(T item) {
      items.add(item);
    }

    @Override
    public void onError(Throwable failure) {
      end.add(failure);
    }

    @Override
    public void onComplete() {
      end.add("complete");
    }
  }

  private static StreamResponse text(String text) {
    return StreamResponse.newBuilder().setDelta(Delta.newBuilder().setText(text)).build();
  }

  private static Status.Code refusalOf(Future<?> future) {
    var error = assertThrows(ExecutionException.class, future::get);
    return assertInstanceOf(IcehouseException.class, error.getCause()).code();
  }

  @Test
  void aFutureHasTheAnswerOrTheFailure() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.SERVING);
        var client = server.client().retryLimit(1).build()) {
      assertEquals("done", client.async().generate(REQUEST).get().getText());
      server.refusals.add(RetriesTest.notNow(Status.Code.RESOURCE_EXHAUSTED, Duration.ofMillis(1)));
      assertEquals("done", client.async().generate(REQUEST, Duration.ofSeconds(50)).get().getText());
      server.refusals.add(Status.INVALID_ARGUMENT.asRuntimeException());
      assertEquals(Status.Code.INVALID_ARGUMENT, refusalOf(client.async().generate(REQUEST)));
      var request = GetServerRequest.getDefaultInstance();
      var described = client.async().call(ServerServiceGrpc.getGetServerMethod(), request);
      assertEquals(ServerState.SERVER_STATE_LOADING, described.get().getServer().getState());
    }
  }

  @Test
  void toCancelAFutureEndsTheWaitingForARetry() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.SERVING);
        var client = server.client().retryLimit(9).withoutTimeout().build()) {
      server.refusals.addAll(
          Collections.nCopies(9, RetriesTest.notNow(Status.Code.RESOURCE_EXHAUSTED, Duration.ofHours(1))));
      var answer = client.async().generate(REQUEST);
      while (server.generateCount.get() == 0) {
        Thread.onSpinWait();
      }
      answer.cancel(false);
      assertThrows(CancellationException.class, answer::get);
    }
  }

  @Test
  void aTokensSourceThatFailsEndsTheCall() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.SERVING);
        var client = server.client().tokenSource(() -> List.of("none").get(1)).build()) {
      var error = assertThrows(ExecutionException.class, client.async().generate(REQUEST)::get);
      assertInstanceOf(IndexOutOfBoundsException.class, error.getCause());
      var reader = new Reader<StreamResponse>();
      client.async().stream(REQUEST).subscribe(reader);
      assertInstanceOf(IndexOutOfBoundsException.class, reader.end.take());
    }
  }

  @Test
  void aStreamGivesWhatIsRequestedAndItsReplyIsTheSum() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.SERVING); var client = server.client().build()) {
      server.events.add(StreamResponse.newBuilder().setStarted(Started.newBuilder().setRequestId("r")).build());
      server.events.add(text("one "));
      server.events.add(text("two"));
      server.events.add(StreamResponse.newBuilder().setFinished(Finished.getDefaultInstance()).build());
      var stream = client.async().stream(REQUEST);
      var reader = new Reader<StreamResponse>();
      stream.subscribe(reader);
      reader.subscription.request(2);
      assertEquals(server.events.get(0), reader.items.take());
      assertEquals(server.events.get(1), reader.items.take());
      assertTrue(reader.items.isEmpty());
      reader.subscription.request(Long.MAX_VALUE);
      assertEquals("complete", reader.end.take());
      assertEquals(server.events.subList(2, 4), List.copyOf(reader.items));
      assertEquals("one two", stream.reply().get().text());

      var texts = new Reader<String>();
      client.async().stream(REQUEST).texts().subscribe(texts);
      texts.subscription.request(1);
      assertEquals("one ", texts.items.take());
      texts.subscription.request(2);
      assertEquals("complete", texts.end.take());
      assertEquals(List.of("two"), List.copyOf(texts.items));
    }
  }

  @Test
  void aSlowReaderSlowsTheServerDown() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.SERVING); var client = server.client().build()) {
      server.events.addAll(Collections.nCopies(40, text("x".repeat(LARGE_BYTES))));
      var reader = new Reader<StreamResponse>();
      client.async().stream(REQUEST).subscribe(reader);
      for (int turn = 0; turn < 5; turn++) {
        reader.subscription.request(1);
        reader.items.take();
      }
      assertTrue(server.sentEventCount.get() < 30, () -> "the server sent " + server.sentEventCount);
      reader.subscription.request(Long.MAX_VALUE);
      assertEquals("complete", reader.end.take());
      assertEquals(35, reader.items.size());
    }
  }

  @Test
  void toCancelTheSubscriptionEndsTheStreamOnTheServerToo() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.SERVING); var client = server.client().build()) {
      server.events.addAll(Collections.nCopies(40, text("x".repeat(LARGE_BYTES))));
      var stream = client.async().stream(REQUEST);
      var reader = new Reader<StreamResponse>();
      stream.subscribe(reader);
      reader.subscription.request(1);
      reader.items.take();
      reader.subscription.cancel();
      server.cancelled.await();
      assertThrows(CancellationException.class, stream.reply()::get);
      assertTrue(reader.end.isEmpty());
    }
  }

  @Test
  void aRefusalAndAMisuseAreToldTheSubscriber() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.SERVING); var client = server.client().build()) {
      server.refusals.add(Status.RESOURCE_EXHAUSTED.asRuntimeException());
      var stream = client.async().stream(REQUEST);
      var reader = new Reader<StreamResponse>();
      stream.subscribe(reader);
      var failure = assertInstanceOf(IcehouseException.class, reader.end.take());
      assertEquals(Status.Code.RESOURCE_EXHAUSTED, failure.code());
      assertEquals(Status.Code.RESOURCE_EXHAUSTED, refusalOf(stream.reply()));

      var late = new Reader<StreamResponse>();
      stream.subscribe(late);
      assertInstanceOf(IllegalStateException.class, late.end.take());

      server.events.add(text("one"));
      var wrong = new Reader<StreamResponse>();
      client.async().stream(REQUEST).subscribe(wrong);
      wrong.subscription.request(0);
      assertInstanceOf(IllegalArgumentException.class, wrong.end.take());
    }
  }
}
