package dev.icehouse.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.Prompt;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.health.v1.HealthCheckResponse.ServingStatus;
import io.grpc.stub.MetadataUtils;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.Consumer;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** What a call carries beside its request: tokens, metadata of its own, what interceptors add. */
@Timeout(60)
class TokenTest {
  private static final Prompt PROMPT = Prompt.newBuilder().setText("Once upon a time").build();
  private static final GenerateRequest REQUEST = GenerateRequest.newBuilder().setPrompt(PROMPT).build();
  private static final Metadata.Key<String> AUTHORIZATION =
      Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);

  private static StatusRuntimeException expired() {
    return Status.UNAUTHENTICATED.withDescription("expired").asRuntimeException();
  }

  private static void drain(IcehouseClient client) {
    try (TextStream stream = client.stream(REQUEST)) {
      stream.iterator().forEachRemaining(text -> {});
    }
  }

  @Test
  void aRefusedTokenIsAskedForAnewAndTheCallMadeAgain() throws Exception {
    for (Consumer<IcehouseClient> call :
        List.<Consumer<IcehouseClient>>of(client -> client.generate(REQUEST), TokenTest::drain)) {
      var count = new AtomicInteger();
      try (var server = new ScriptedServer(ServingStatus.SERVING);
          var client = server.client().tokenSource(() -> "t" + count.incrementAndGet()).build()) {
        call.accept(client);
        call.accept(client);
        assertEquals("Bearer t1", server.headers.get(AUTHORIZATION));
        server.refusals.add(expired());
        call.accept(client);
        assertEquals("Bearer t2", server.headers.get(AUTHORIZATION));
        server.refusals.addAll(Collections.nCopies(2, expired()));
        var error = assertThrows(IcehouseException.class, () -> call.accept(client));
        assertEquals(Status.Code.UNAUTHENTICATED, error.code());
        assertEquals(3, count.get());
      }
    }
  }

  @Test
  void aTokenWithoutASourceIsRefusedForGood() throws Exception {
    try (var server = new ScriptedServer(ServingStatus.SERVING);
        var client = server.client().token("secret").build()) {
      server.refusals.add(expired());
      assertThrows(IcehouseException.class, () -> client.generate(REQUEST));
      assertEquals(1, server.generateCount.get());
    }
  }

  @Test
  void aSourceThatFailsEndsTheCall() throws Exception {
    var answers = new ArrayList<>(List.of("t1"));
    try (var server = new ScriptedServer(ServingStatus.SERVING);
        var client = server.client().tokenSource(() -> answers.remove(0)).build()) {
      server.refusals.add(expired());
      var error = assertThrows(IcehouseException.class, () -> client.generate(REQUEST));
      assertEquals(Status.Code.UNAUTHENTICATED, error.code());
      assertEquals(IndexOutOfBoundsException.class, error.getCause().getCause().getClass());
      assertThrows(IndexOutOfBoundsException.class, () -> client.generate(REQUEST));
    }
  }

  @Test
  void aTokenOfTheCallsOwnComesFirst() throws Exception {
    var own = new Metadata();
    own.put(AUTHORIZATION, "Bearer own");
    try (var server = new ScriptedServer(ServingStatus.SERVING);
        var client = server.client().token("secret").build()) {
      client.withMetadata(own).generate(REQUEST);
      assertEquals(List.of("Bearer own"), everyOne(server));
      client.generate(REQUEST);
      assertEquals(List.of("Bearer secret"), everyOne(server));
    }
  }

  private static List<String> everyOne(ScriptedServer server) {
    var found = new ArrayList<String>();
    server.headers.getAll(AUTHORIZATION).forEach(found::add);
    return found;
  }

  @Test
  void interceptorsSeeEveryAttemptOfACall() throws Exception {
    var seen = new ArrayList<String>();
    var watching =
        new ClientInterceptor() {
          @Override
          public <I, O> ClientCall<I, O> interceptCall(
              MethodDescriptor<I, O> method, CallOptions options, Channel next) {
            seen.add(method.getBareMethodName());
            return next.newCall(method, options);
          }
        };
    var trace = new Metadata();
    var name = Metadata.Key.of("x-trace", Metadata.ASCII_STRING_MARSHALLER);
    trace.put(name, "1");
    try (var server = new ScriptedServer(ServingStatus.SERVING);
        var client =
            server
                .client()
                .retryLimit(1)
                .intercept(watching, MetadataUtils.newAttachHeadersInterceptor(trace))
                .build()) {
      server.refusals.add(RetriesTest.notNow(Status.Code.RESOURCE_EXHAUSTED, Duration.ZERO));
      client.generate(REQUEST);
      assertEquals(List.of("Generate", "Generate"), seen);
      assertEquals("1", server.headers.get(name));
    }
  }
}
