package dev.icehouse.client;

import dev.icehouse.v1.EmbedRequest;
import dev.icehouse.v1.EmbedResponse;
import dev.icehouse.v1.EmbeddingServiceGrpc;
import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.GenerateResponse;
import dev.icehouse.v1.InferenceServiceGrpc;
import dev.icehouse.v1.RerankRequest;
import dev.icehouse.v1.RerankResponse;
import dev.icehouse.v1.RerankServiceGrpc;
import dev.icehouse.v1.TokenizeRequest;
import dev.icehouse.v1.TokenizeResponse;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import java.time.Duration;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;

/**
 * Calls of an {@link IcehouseClient} that do not block: {@link IcehouseClient#async}. A failed call completes its
 * future with an {@link IcehouseException}. Cancelling a future that a method returned ends the call on the server too.
 * Stages that depend on a future run in a thread of gRPC unless they name an executor.
 */
public final class AsyncClient {
  private final Channel channel;

  AsyncClient(Channel channel) {
    this.channel = channel;
  }

  /** The whole output. Retried until the deadline while no server is available. */
  public CompletableFuture<GenerateResponse> generate(GenerateRequest request) {
    return call(InferenceServiceGrpc.getGenerateMethod(), request);
  }

  /** As {@link #generate(GenerateRequest)}, with a deadline of its own. */
  public CompletableFuture<GenerateResponse> generate(GenerateRequest request, Duration timeout) {
    return call(InferenceServiceGrpc.getGenerateMethod(), request, within(timeout));
  }

  /** As {@link IcehouseClient#generateJson}. */
  public <T> CompletableFuture<T> generateJson(GenerateRequest request, Class<T> type) {
    var output = JsonOutput.of(type);
    CompletableFuture<GenerateResponse> answer = generate(output.asked(request));
    CompletableFuture<T> value = answer.thenApply(output::read);
    // The caller can only cancel this one.
    value.whenComplete((read, failure) -> answer.cancel(false));
    return value;
  }

  /** An output that arrives in pieces. It begins when a subscriber arrives, and is never retried. */
  public ReplyPublisher stream(GenerateRequest request) {
    return new ReplyPublisher(watch(InferenceServiceGrpc.getStreamMethod(), request), request);
  }

  /** As {@link #stream(GenerateRequest)}, with a deadline of its own. */
  public ReplyPublisher stream(GenerateRequest request, Duration timeout) {
    var responses = watch(InferenceServiceGrpc.getStreamMethod(), request, within(timeout));
    return new ReplyPublisher(responses, request);
  }

  /** A vector for each input. Retried as generate is. */
  public CompletableFuture<EmbedResponse> embed(EmbedRequest request) {
    return call(EmbeddingServiceGrpc.getEmbedMethod(), request);
  }

  /** Documents ranked by how well they answer a query, best first. Retried as generate is. */
  public CompletableFuture<RerankResponse> rerank(RerankRequest request) {
    return call(RerankServiceGrpc.getRerankMethod(), request);
  }

  /** The tokens of a prompt. */
  public CompletableFuture<TokenizeResponse> tokenize(TokenizeRequest request) {
    return call(InferenceServiceGrpc.getTokenizeMethod(), request);
  }

  /** Calls any method that has one answer, such as {@code CacheServiceGrpc.getExplainMethod()}. */
  public <I, O> CompletableFuture<O> call(MethodDescriptor<I, O> method, I request) {
    return call(method, request, CallOptions.DEFAULT);
  }

  /** The answers of any method that streams them, such as {@code CacheServiceGrpc.getWarmMethod()}. */
  public <I, O> ResponsePublisher<O> watch(MethodDescriptor<I, O> method, I request) {
    return watch(method, request, CallOptions.DEFAULT);
  }

  private <I, O> CompletableFuture<O> call(MethodDescriptor<I, O> method, I request, CallOptions options) {
    ClientCall<I, O> call = channel.newCall(method, options);
    var answer = new Answer<O>();
    answer.future.whenComplete(
        (value, failure) -> {
          if (answer.future.isCancelled()) {
            call.cancel("the future was cancelled", null);
          }
        });
    call.start(answer, new Metadata());
    call.request(1);
    try {
      send(call, request);
    } catch (RuntimeException error) {
      answer.future.completeExceptionally(error);
      call.cancel(error.getMessage(), error);
    }
    return answer.future;
  }

  private <I, O> ResponsePublisher<O> watch(MethodDescriptor<I, O> method, I request, CallOptions options) {
    return new ResponsePublisher<>(
        () -> {
          ClientCall<I, O> call = channel.newCall(method, options);
          return new ResponsePublisher.Begun<>(call, () -> send(call, request));
        });
  }

  private static <I> void send(ClientCall<I, ?> call, I request) {
    call.sendMessage(request);
    call.halfClose();
  }

  private static CallOptions within(Duration timeout) {
    return CallOptions.DEFAULT.withDeadlineAfter(timeout.toNanos(), TimeUnit.NANOSECONDS);
  }

  private static final class Answer<O> extends ClientCall.Listener<O> {
    private final CompletableFuture<O> future = new CompletableFuture<>();
    private O message;

    @Override
    public void onMessage(O message) {
      this.message = message;
    }

    @Override
    public void onClose(Status status, Metadata trailers) {
      Status end = status.isOk() && message == null ? Status.INTERNAL.withDescription("there is no answer") : status;
      if (end.isOk()) {
        future.complete(message);
      } else {
        future.completeExceptionally(new IcehouseException(end.asRuntimeException(trailers)));
      }
    }
  }
}
