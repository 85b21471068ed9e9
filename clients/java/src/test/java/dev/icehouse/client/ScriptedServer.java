package dev.icehouse.client;

import dev.icehouse.v1.CacheServiceGrpc;
import dev.icehouse.v1.CancelRequestRequest;
import dev.icehouse.v1.CancelRequestResponse;
import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.GenerateResponse;
import dev.icehouse.v1.GetServerRequest;
import dev.icehouse.v1.GetServerResponse;
import dev.icehouse.v1.InferenceServiceGrpc;
import dev.icehouse.v1.RequestInfo;
import dev.icehouse.v1.ServerServiceGrpc;
import dev.icehouse.v1.ServerState;
import dev.icehouse.v1.StreamResponse;
import dev.icehouse.v1.WarmRequest;
import dev.icehouse.v1.WarmResponse;
import dev.icehouse.v1.WarmResult;
import io.grpc.Context;
import io.grpc.Contexts;
import io.grpc.Deadline;
import io.grpc.Grpc;
import io.grpc.InsecureServerCredentials;
import io.grpc.Metadata;
import io.grpc.Server;
import io.grpc.ServerCall;
import io.grpc.ServerCallHandler;
import io.grpc.ServerInterceptor;
import io.grpc.StatusRuntimeException;
import io.grpc.health.v1.HealthCheckResponse.ServingStatus;
import io.grpc.protobuf.services.HealthStatusManager;
import io.grpc.stub.ServerCallStreamObserver;
import io.grpc.stub.StreamObserver;
import java.io.IOException;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicInteger;

/** A server that refuses as often as it is told; a real one cannot be made to do that. */
final class ScriptedServer extends InferenceServiceGrpc.InferenceServiceImplBase
    implements ServerInterceptor, AutoCloseable {
  final Deque<StatusRuntimeException> refusals = new ArrayDeque<>();
  final AtomicInteger generateCount = new AtomicInteger();
  final AtomicInteger streamCount = new AtomicInteger();

  /** What a stream answers, as fast as its reader takes it. */
  final List<StreamResponse> events = new ArrayList<>();

  final AtomicInteger sentEventCount = new AtomicInteger();
  final CountDownLatch cancelled = new CountDownLatch(1);
  volatile Metadata headers = new Metadata();
  volatile boolean hasDeadline;
  volatile long remainingMinutes;

  /** What a warm-up answers. */
  final List<WarmResponse> warmEvents =
      new ArrayList<>(List.of(WarmResponse.newBuilder().setDone(WarmResult.newBuilder().setRequestId("r1")).build()));

  private final CacheServiceGrpc.CacheServiceImplBase cache =
      new CacheServiceGrpc.CacheServiceImplBase() {
        @Override
        public void warm(WarmRequest request, StreamObserver<WarmResponse> observer) {
          if (!isRefused(observer)) {
            warmEvents.forEach(observer::onNext);
            observer.onCompleted();
          }
        }
      };

  /** What GetServer tells, one a call, and that it loads when all are told. */
  final Deque<ServerState> states = new ArrayDeque<>();

  /** Answers a cancel with what it was asked for; a tenant that is not named is "nobody". */
  private final ServerServiceGrpc.ServerServiceImplBase operations =
      new ServerServiceGrpc.ServerServiceImplBase() {
        @Override
        public void getServer(GetServerRequest request, StreamObserver<GetServerResponse> observer) {
          if (!isRefused(observer)) {
            var state = states.isEmpty() ? ServerState.SERVER_STATE_LOADING : states.remove();
            var server = dev.icehouse.v1.Server.newBuilder().setState(state);
            observer.onNext(GetServerResponse.newBuilder().setServer(server).build());
            observer.onCompleted();
          }
        }

        @Override
        public void cancelRequest(CancelRequestRequest request, StreamObserver<CancelRequestResponse> observer) {
          var found = RequestInfo.newBuilder().setRequestId(request.getRequestId());
          found.setTenant(request.hasTenant() ? request.getTenant() : "nobody");
          observer.onNext(CancelRequestResponse.newBuilder().setRequest(found).build());
          observer.onCompleted();
        }
      };

  private final HealthStatusManager health = new HealthStatusManager();
  private final Server server;

  ScriptedServer(ServingStatus status) throws IOException {
    health.setStatus(InferenceServiceGrpc.SERVICE_NAME, status);
    server =
        Grpc.newServerBuilderForPort(0, InsecureServerCredentials.create())
            .addService(this)
            .addService(cache)
            .addService(operations)
            .addService(health.getHealthService())
            .intercept(this)
            .build()
            .start();
  }

  int port() {
    return server.getPort();
  }

  IcehouseClient.Builder client() {
    return IcehouseClient.to("127.0.0.1:" + port());
  }

  @Override
  public <I, O> ServerCall.Listener<I> interceptCall(
      ServerCall<I, O> call, Metadata metadata, ServerCallHandler<I, O> next) {
    if (call.getMethodDescriptor().getServiceName().startsWith("icehouse.v1.")) {
      headers = metadata;
      Deadline deadline = Context.current().getDeadline();
      hasDeadline = deadline != null;
      remainingMinutes = hasDeadline ? Math.round(deadline.timeRemaining(TimeUnit.SECONDS) / 60.0) : 0;
    }
    return Contexts.interceptCall(Context.current(), call, metadata, next);
  }

  @Override
  public void generate(GenerateRequest request, StreamObserver<GenerateResponse> observer) {
    generateCount.incrementAndGet();
    if (!isRefused(observer)) {
      observer.onNext(GenerateResponse.newBuilder().setText("done").build());
      observer.onCompleted();
    }
  }

  @Override
  public void stream(GenerateRequest request, StreamObserver<StreamResponse> observer) {
    streamCount.incrementAndGet();
    if (isRefused(observer)) {
      return;
    }
    var reader = (ServerCallStreamObserver<StreamResponse>) observer;
    reader.setOnCancelHandler(cancelled::countDown);
    var left = new ArrayDeque<>(events);
    var isComplete = new AtomicBoolean();
    reader.setOnReadyHandler(
        () -> {
          while (reader.isReady() && !left.isEmpty()) {
            reader.onNext(left.remove());
            sentEventCount.incrementAndGet();
          }
          if (left.isEmpty() && isComplete.compareAndSet(false, true)) {
            reader.onCompleted();
          }
        });
  }

  private boolean isRefused(StreamObserver<?> observer) {
    StatusRuntimeException refusal = refusals.poll();
    if (refusal != null) {
      observer.onError(refusal);
    }
    return refusal != null;
  }

  @Override
  public void close() throws InterruptedException {
    server.shutdownNow().awaitTermination();
  }
}
