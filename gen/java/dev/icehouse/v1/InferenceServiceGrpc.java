package dev.icehouse.v1;

import static io.grpc.MethodDescriptor.generateFullMethodName;

/**
 * <pre>
 * Continues prompts.
 * Presence, in every message of this API: a scalar field is `optional` where its zero is a legal value that
 * differs from leaving the field out. Everywhere else zero, false or empty means the default, which the field's
 * comment names.
 * Errors: a call is refused before its first response message, with a status that carries google.rpc.ErrorInfo
 * (domain "icehouse.dev"; `reason` is stable and listed in error_reason.proto; `metadata` holds the values of the
 * message as they are) and, where they apply, BadRequest, RetryInfo or QuotaFailure. The codes are
 * INVALID_ARGUMENT (a field, which is named), NOT_FOUND (model), ALREADY_EXISTS (request id in use),
 * RESOURCE_EXHAUSTED (full now; see RetryInfo), FAILED_PRECONDITION (can never fit this machine),
 * UNAUTHENTICATED (no credentials, or unknown ones), PERMISSION_DENIED (another tenant's),
 * UNAVAILABLE (loading or draining), DEADLINE_EXCEEDED, CANCELLED, INTERNAL (a fault of the server).
 * A call without a deadline gets the one of its method: four hours where the model runs, ten minutes for
 * Tokenize and Detokenize, one minute for CacheStats (docs/methods.md).
 * </pre>
 */
@io.grpc.stub.annotations.GrpcGenerated
public final class InferenceServiceGrpc {

  private InferenceServiceGrpc() {}

  public static final java.lang.String SERVICE_NAME = "icehouse.v1.InferenceService";

  // Static method descriptors that strictly reflect the proto.
  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.GenerateRequest,
      dev.icehouse.v1.GenerateResponse> getGenerateMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Generate",
      requestType = dev.icehouse.v1.GenerateRequest.class,
      responseType = dev.icehouse.v1.GenerateResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.GenerateRequest,
      dev.icehouse.v1.GenerateResponse> getGenerateMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.GenerateRequest, dev.icehouse.v1.GenerateResponse> getGenerateMethod;
    if ((getGenerateMethod = InferenceServiceGrpc.getGenerateMethod) == null) {
      synchronized (InferenceServiceGrpc.class) {
        if ((getGenerateMethod = InferenceServiceGrpc.getGenerateMethod) == null) {
          InferenceServiceGrpc.getGenerateMethod = getGenerateMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.GenerateRequest, dev.icehouse.v1.GenerateResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Generate"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.GenerateRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.GenerateResponse.getDefaultInstance()))
              .setSchemaDescriptor(new InferenceServiceMethodDescriptorSupplier("Generate"))
              .build();
        }
      }
    }
    return getGenerateMethod;
  }

  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.GenerateRequest,
      dev.icehouse.v1.StreamResponse> getStreamMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Stream",
      requestType = dev.icehouse.v1.GenerateRequest.class,
      responseType = dev.icehouse.v1.StreamResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.GenerateRequest,
      dev.icehouse.v1.StreamResponse> getStreamMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.GenerateRequest, dev.icehouse.v1.StreamResponse> getStreamMethod;
    if ((getStreamMethod = InferenceServiceGrpc.getStreamMethod) == null) {
      synchronized (InferenceServiceGrpc.class) {
        if ((getStreamMethod = InferenceServiceGrpc.getStreamMethod) == null) {
          InferenceServiceGrpc.getStreamMethod = getStreamMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.GenerateRequest, dev.icehouse.v1.StreamResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Stream"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.GenerateRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.StreamResponse.getDefaultInstance()))
              .setSchemaDescriptor(new InferenceServiceMethodDescriptorSupplier("Stream"))
              .build();
        }
      }
    }
    return getStreamMethod;
  }

  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.TokenizeRequest,
      dev.icehouse.v1.TokenizeResponse> getTokenizeMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Tokenize",
      requestType = dev.icehouse.v1.TokenizeRequest.class,
      responseType = dev.icehouse.v1.TokenizeResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.TokenizeRequest,
      dev.icehouse.v1.TokenizeResponse> getTokenizeMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.TokenizeRequest, dev.icehouse.v1.TokenizeResponse> getTokenizeMethod;
    if ((getTokenizeMethod = InferenceServiceGrpc.getTokenizeMethod) == null) {
      synchronized (InferenceServiceGrpc.class) {
        if ((getTokenizeMethod = InferenceServiceGrpc.getTokenizeMethod) == null) {
          InferenceServiceGrpc.getTokenizeMethod = getTokenizeMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.TokenizeRequest, dev.icehouse.v1.TokenizeResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Tokenize"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.TokenizeRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.TokenizeResponse.getDefaultInstance()))
              .setSchemaDescriptor(new InferenceServiceMethodDescriptorSupplier("Tokenize"))
              .build();
        }
      }
    }
    return getTokenizeMethod;
  }

  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.DetokenizeRequest,
      dev.icehouse.v1.DetokenizeResponse> getDetokenizeMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Detokenize",
      requestType = dev.icehouse.v1.DetokenizeRequest.class,
      responseType = dev.icehouse.v1.DetokenizeResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.DetokenizeRequest,
      dev.icehouse.v1.DetokenizeResponse> getDetokenizeMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.DetokenizeRequest, dev.icehouse.v1.DetokenizeResponse> getDetokenizeMethod;
    if ((getDetokenizeMethod = InferenceServiceGrpc.getDetokenizeMethod) == null) {
      synchronized (InferenceServiceGrpc.class) {
        if ((getDetokenizeMethod = InferenceServiceGrpc.getDetokenizeMethod) == null) {
          InferenceServiceGrpc.getDetokenizeMethod = getDetokenizeMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.DetokenizeRequest, dev.icehouse.v1.DetokenizeResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Detokenize"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.DetokenizeRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.DetokenizeResponse.getDefaultInstance()))
              .setSchemaDescriptor(new InferenceServiceMethodDescriptorSupplier("Detokenize"))
              .build();
        }
      }
    }
    return getDetokenizeMethod;
  }

  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.CacheStatsRequest,
      dev.icehouse.v1.CacheStatsResponse> getCacheStatsMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "CacheStats",
      requestType = dev.icehouse.v1.CacheStatsRequest.class,
      responseType = dev.icehouse.v1.CacheStatsResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.CacheStatsRequest,
      dev.icehouse.v1.CacheStatsResponse> getCacheStatsMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.CacheStatsRequest, dev.icehouse.v1.CacheStatsResponse> getCacheStatsMethod;
    if ((getCacheStatsMethod = InferenceServiceGrpc.getCacheStatsMethod) == null) {
      synchronized (InferenceServiceGrpc.class) {
        if ((getCacheStatsMethod = InferenceServiceGrpc.getCacheStatsMethod) == null) {
          InferenceServiceGrpc.getCacheStatsMethod = getCacheStatsMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.CacheStatsRequest, dev.icehouse.v1.CacheStatsResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "CacheStats"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.CacheStatsRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.CacheStatsResponse.getDefaultInstance()))
              .setSchemaDescriptor(new InferenceServiceMethodDescriptorSupplier("CacheStats"))
              .build();
        }
      }
    }
    return getCacheStatsMethod;
  }

  /**
   * Creates a new async stub that supports all call types for the service
   */
  public static InferenceServiceStub newStub(io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<InferenceServiceStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<InferenceServiceStub>() {
        @java.lang.Override
        public InferenceServiceStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new InferenceServiceStub(channel, callOptions);
        }
      };
    return InferenceServiceStub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports all types of calls on the service
   */
  public static InferenceServiceBlockingV2Stub newBlockingV2Stub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<InferenceServiceBlockingV2Stub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<InferenceServiceBlockingV2Stub>() {
        @java.lang.Override
        public InferenceServiceBlockingV2Stub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new InferenceServiceBlockingV2Stub(channel, callOptions);
        }
      };
    return InferenceServiceBlockingV2Stub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports unary and streaming output calls on the service
   */
  public static InferenceServiceBlockingStub newBlockingStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<InferenceServiceBlockingStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<InferenceServiceBlockingStub>() {
        @java.lang.Override
        public InferenceServiceBlockingStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new InferenceServiceBlockingStub(channel, callOptions);
        }
      };
    return InferenceServiceBlockingStub.newStub(factory, channel);
  }

  /**
   * Creates a new ListenableFuture-style stub that supports unary calls on the service
   */
  public static InferenceServiceFutureStub newFutureStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<InferenceServiceFutureStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<InferenceServiceFutureStub>() {
        @java.lang.Override
        public InferenceServiceFutureStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new InferenceServiceFutureStub(channel, callOptions);
        }
      };
    return InferenceServiceFutureStub.newStub(factory, channel);
  }

  /**
   * <pre>
   * Continues prompts.
   * Presence, in every message of this API: a scalar field is `optional` where its zero is a legal value that
   * differs from leaving the field out. Everywhere else zero, false or empty means the default, which the field's
   * comment names.
   * Errors: a call is refused before its first response message, with a status that carries google.rpc.ErrorInfo
   * (domain "icehouse.dev"; `reason` is stable and listed in error_reason.proto; `metadata` holds the values of the
   * message as they are) and, where they apply, BadRequest, RetryInfo or QuotaFailure. The codes are
   * INVALID_ARGUMENT (a field, which is named), NOT_FOUND (model), ALREADY_EXISTS (request id in use),
   * RESOURCE_EXHAUSTED (full now; see RetryInfo), FAILED_PRECONDITION (can never fit this machine),
   * UNAUTHENTICATED (no credentials, or unknown ones), PERMISSION_DENIED (another tenant's),
   * UNAVAILABLE (loading or draining), DEADLINE_EXCEEDED, CANCELLED, INTERNAL (a fault of the server).
   * A call without a deadline gets the one of its method: four hours where the model runs, ten minutes for
   * Tokenize and Detokenize, one minute for CacheStats (docs/methods.md).
   * </pre>
   */
  public interface AsyncService {

    /**
     * <pre>
     * Generates and answers once, when the output is complete.
     * </pre>
     */
    default void generate(dev.icehouse.v1.GenerateRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.GenerateResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getGenerateMethod(), responseObserver);
    }

    /**
     * <pre>
     * Generates and streams the output: one `started` first, one `finished` last (for each completion,
     * where several were requested). The texts of a completion's deltas, joined, are the text that
     * Generate returns; so are reasoning and tool calls. When the caller cancels, disconnects or its deadline
     * passes, the request ends within one step. A caller who stops reading is disconnected with
     * RESOURCE_EXHAUSTED (READER_STALLED) once too much output is waiting.
     * </pre>
     */
    default void stream(dev.icehouse.v1.GenerateRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.StreamResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getStreamMethod(), responseObserver);
    }

    /**
     * <pre>
     * Turns a prompt into tokens exactly as Generate would.
     * </pre>
     */
    default void tokenize(dev.icehouse.v1.TokenizeRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.TokenizeResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getTokenizeMethod(), responseObserver);
    }

    /**
     * <pre>
     * Turns tokens into text: the reverse of Tokenize.
     * </pre>
     */
    default void detokenize(dev.icehouse.v1.DetokenizeRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.DetokenizeResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getDetokenizeMethod(), responseObserver);
    }

    /**
     * <pre>
     * Returns the counters of the prefix cache, taken between two steps. They cover all tenants, so with
     * authenticated callers only operators may call this; ServerService.GetStats shows each tenant its own share.
     * </pre>
     */
    default void cacheStats(dev.icehouse.v1.CacheStatsRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.CacheStatsResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getCacheStatsMethod(), responseObserver);
    }
  }

  /**
   * Base class for the server implementation of the service InferenceService.
   * <pre>
   * Continues prompts.
   * Presence, in every message of this API: a scalar field is `optional` where its zero is a legal value that
   * differs from leaving the field out. Everywhere else zero, false or empty means the default, which the field's
   * comment names.
   * Errors: a call is refused before its first response message, with a status that carries google.rpc.ErrorInfo
   * (domain "icehouse.dev"; `reason` is stable and listed in error_reason.proto; `metadata` holds the values of the
   * message as they are) and, where they apply, BadRequest, RetryInfo or QuotaFailure. The codes are
   * INVALID_ARGUMENT (a field, which is named), NOT_FOUND (model), ALREADY_EXISTS (request id in use),
   * RESOURCE_EXHAUSTED (full now; see RetryInfo), FAILED_PRECONDITION (can never fit this machine),
   * UNAUTHENTICATED (no credentials, or unknown ones), PERMISSION_DENIED (another tenant's),
   * UNAVAILABLE (loading or draining), DEADLINE_EXCEEDED, CANCELLED, INTERNAL (a fault of the server).
   * A call without a deadline gets the one of its method: four hours where the model runs, ten minutes for
   * Tokenize and Detokenize, one minute for CacheStats (docs/methods.md).
   * </pre>
   */
  public static abstract class InferenceServiceImplBase
      implements io.grpc.BindableService, AsyncService {

    @java.lang.Override public final io.grpc.ServerServiceDefinition bindService() {
      return InferenceServiceGrpc.bindService(this);
    }
  }

  /**
   * A stub to allow clients to do asynchronous rpc calls to service InferenceService.
   * <pre>
   * Continues prompts.
   * Presence, in every message of this API: a scalar field is `optional` where its zero is a legal value that
   * differs from leaving the field out. Everywhere else zero, false or empty means the default, which the field's
   * comment names.
   * Errors: a call is refused before its first response message, with a status that carries google.rpc.ErrorInfo
   * (domain "icehouse.dev"; `reason` is stable and listed in error_reason.proto; `metadata` holds the values of the
   * message as they are) and, where they apply, BadRequest, RetryInfo or QuotaFailure. The codes are
   * INVALID_ARGUMENT (a field, which is named), NOT_FOUND (model), ALREADY_EXISTS (request id in use),
   * RESOURCE_EXHAUSTED (full now; see RetryInfo), FAILED_PRECONDITION (can never fit this machine),
   * UNAUTHENTICATED (no credentials, or unknown ones), PERMISSION_DENIED (another tenant's),
   * UNAVAILABLE (loading or draining), DEADLINE_EXCEEDED, CANCELLED, INTERNAL (a fault of the server).
   * A call without a deadline gets the one of its method: four hours where the model runs, ten minutes for
   * Tokenize and Detokenize, one minute for CacheStats (docs/methods.md).
   * </pre>
   */
  public static final class InferenceServiceStub
      extends io.grpc.stub.AbstractAsyncStub<InferenceServiceStub> {
    private InferenceServiceStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected InferenceServiceStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new InferenceServiceStub(channel, callOptions);
    }

    /**
     * <pre>
     * Generates and answers once, when the output is complete.
     * </pre>
     */
    public void generate(dev.icehouse.v1.GenerateRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.GenerateResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getGenerateMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Generates and streams the output: one `started` first, one `finished` last (for each completion,
     * where several were requested). The texts of a completion's deltas, joined, are the text that
     * Generate returns; so are reasoning and tool calls. When the caller cancels, disconnects or its deadline
     * passes, the request ends within one step. A caller who stops reading is disconnected with
     * RESOURCE_EXHAUSTED (READER_STALLED) once too much output is waiting.
     * </pre>
     */
    public void stream(dev.icehouse.v1.GenerateRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.StreamResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncServerStreamingCall(
          getChannel().newCall(getStreamMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Turns a prompt into tokens exactly as Generate would.
     * </pre>
     */
    public void tokenize(dev.icehouse.v1.TokenizeRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.TokenizeResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getTokenizeMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Turns tokens into text: the reverse of Tokenize.
     * </pre>
     */
    public void detokenize(dev.icehouse.v1.DetokenizeRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.DetokenizeResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getDetokenizeMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Returns the counters of the prefix cache, taken between two steps. They cover all tenants, so with
     * authenticated callers only operators may call this; ServerService.GetStats shows each tenant its own share.
     * </pre>
     */
    public void cacheStats(dev.icehouse.v1.CacheStatsRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.CacheStatsResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getCacheStatsMethod(), getCallOptions()), request, responseObserver);
    }
  }

  /**
   * A stub to allow clients to do synchronous rpc calls to service InferenceService.
   * <pre>
   * Continues prompts.
   * Presence, in every message of this API: a scalar field is `optional` where its zero is a legal value that
   * differs from leaving the field out. Everywhere else zero, false or empty means the default, which the field's
   * comment names.
   * Errors: a call is refused before its first response message, with a status that carries google.rpc.ErrorInfo
   * (domain "icehouse.dev"; `reason` is stable and listed in error_reason.proto; `metadata` holds the values of the
   * message as they are) and, where they apply, BadRequest, RetryInfo or QuotaFailure. The codes are
   * INVALID_ARGUMENT (a field, which is named), NOT_FOUND (model), ALREADY_EXISTS (request id in use),
   * RESOURCE_EXHAUSTED (full now; see RetryInfo), FAILED_PRECONDITION (can never fit this machine),
   * UNAUTHENTICATED (no credentials, or unknown ones), PERMISSION_DENIED (another tenant's),
   * UNAVAILABLE (loading or draining), DEADLINE_EXCEEDED, CANCELLED, INTERNAL (a fault of the server).
   * A call without a deadline gets the one of its method: four hours where the model runs, ten minutes for
   * Tokenize and Detokenize, one minute for CacheStats (docs/methods.md).
   * </pre>
   */
  public static final class InferenceServiceBlockingV2Stub
      extends io.grpc.stub.AbstractBlockingStub<InferenceServiceBlockingV2Stub> {
    private InferenceServiceBlockingV2Stub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected InferenceServiceBlockingV2Stub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new InferenceServiceBlockingV2Stub(channel, callOptions);
    }

    /**
     * <pre>
     * Generates and answers once, when the output is complete.
     * </pre>
     */
    public dev.icehouse.v1.GenerateResponse generate(dev.icehouse.v1.GenerateRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getGenerateMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Generates and streams the output: one `started` first, one `finished` last (for each completion,
     * where several were requested). The texts of a completion's deltas, joined, are the text that
     * Generate returns; so are reasoning and tool calls. When the caller cancels, disconnects or its deadline
     * passes, the request ends within one step. A caller who stops reading is disconnected with
     * RESOURCE_EXHAUSTED (READER_STALLED) once too much output is waiting.
     * </pre>
     */
    @io.grpc.ExperimentalApi("https://github.com/grpc/grpc-java/issues/10918")
    public io.grpc.stub.BlockingClientCall<?, dev.icehouse.v1.StreamResponse>
        stream(dev.icehouse.v1.GenerateRequest request) {
      return io.grpc.stub.ClientCalls.blockingV2ServerStreamingCall(
          getChannel(), getStreamMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Turns a prompt into tokens exactly as Generate would.
     * </pre>
     */
    public dev.icehouse.v1.TokenizeResponse tokenize(dev.icehouse.v1.TokenizeRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getTokenizeMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Turns tokens into text: the reverse of Tokenize.
     * </pre>
     */
    public dev.icehouse.v1.DetokenizeResponse detokenize(dev.icehouse.v1.DetokenizeRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getDetokenizeMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Returns the counters of the prefix cache, taken between two steps. They cover all tenants, so with
     * authenticated callers only operators may call this; ServerService.GetStats shows each tenant its own share.
     * </pre>
     */
    public dev.icehouse.v1.CacheStatsResponse cacheStats(dev.icehouse.v1.CacheStatsRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getCacheStatsMethod(), getCallOptions(), request);
    }
  }

  /**
   * A stub to allow clients to do limited synchronous rpc calls to service InferenceService.
   * <pre>
   * Continues prompts.
   * Presence, in every message of this API: a scalar field is `optional` where its zero is a legal value that
   * differs from leaving the field out. Everywhere else zero, false or empty means the default, which the field's
   * comment names.
   * Errors: a call is refused before its first response message, with a status that carries google.rpc.ErrorInfo
   * (domain "icehouse.dev"; `reason` is stable and listed in error_reason.proto; `metadata` holds the values of the
   * message as they are) and, where they apply, BadRequest, RetryInfo or QuotaFailure. The codes are
   * INVALID_ARGUMENT (a field, which is named), NOT_FOUND (model), ALREADY_EXISTS (request id in use),
   * RESOURCE_EXHAUSTED (full now; see RetryInfo), FAILED_PRECONDITION (can never fit this machine),
   * UNAUTHENTICATED (no credentials, or unknown ones), PERMISSION_DENIED (another tenant's),
   * UNAVAILABLE (loading or draining), DEADLINE_EXCEEDED, CANCELLED, INTERNAL (a fault of the server).
   * A call without a deadline gets the one of its method: four hours where the model runs, ten minutes for
   * Tokenize and Detokenize, one minute for CacheStats (docs/methods.md).
   * </pre>
   */
  public static final class InferenceServiceBlockingStub
      extends io.grpc.stub.AbstractBlockingStub<InferenceServiceBlockingStub> {
    private InferenceServiceBlockingStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected InferenceServiceBlockingStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new InferenceServiceBlockingStub(channel, callOptions);
    }

    /**
     * <pre>
     * Generates and answers once, when the output is complete.
     * </pre>
     */
    public dev.icehouse.v1.GenerateResponse generate(dev.icehouse.v1.GenerateRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getGenerateMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Generates and streams the output: one `started` first, one `finished` last (for each completion,
     * where several were requested). The texts of a completion's deltas, joined, are the text that
     * Generate returns; so are reasoning and tool calls. When the caller cancels, disconnects or its deadline
     * passes, the request ends within one step. A caller who stops reading is disconnected with
     * RESOURCE_EXHAUSTED (READER_STALLED) once too much output is waiting.
     * </pre>
     */
    public java.util.Iterator<dev.icehouse.v1.StreamResponse> stream(
        dev.icehouse.v1.GenerateRequest request) {
      return io.grpc.stub.ClientCalls.blockingServerStreamingCall(
          getChannel(), getStreamMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Turns a prompt into tokens exactly as Generate would.
     * </pre>
     */
    public dev.icehouse.v1.TokenizeResponse tokenize(dev.icehouse.v1.TokenizeRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getTokenizeMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Turns tokens into text: the reverse of Tokenize.
     * </pre>
     */
    public dev.icehouse.v1.DetokenizeResponse detokenize(dev.icehouse.v1.DetokenizeRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getDetokenizeMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Returns the counters of the prefix cache, taken between two steps. They cover all tenants, so with
     * authenticated callers only operators may call this; ServerService.GetStats shows each tenant its own share.
     * </pre>
     */
    public dev.icehouse.v1.CacheStatsResponse cacheStats(dev.icehouse.v1.CacheStatsRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getCacheStatsMethod(), getCallOptions(), request);
    }
  }

  /**
   * A stub to allow clients to do ListenableFuture-style rpc calls to service InferenceService.
   * <pre>
   * Continues prompts.
   * Presence, in every message of this API: a scalar field is `optional` where its zero is a legal value that
   * differs from leaving the field out. Everywhere else zero, false or empty means the default, which the field's
   * comment names.
   * Errors: a call is refused before its first response message, with a status that carries google.rpc.ErrorInfo
   * (domain "icehouse.dev"; `reason` is stable and listed in error_reason.proto; `metadata` holds the values of the
   * message as they are) and, where they apply, BadRequest, RetryInfo or QuotaFailure. The codes are
   * INVALID_ARGUMENT (a field, which is named), NOT_FOUND (model), ALREADY_EXISTS (request id in use),
   * RESOURCE_EXHAUSTED (full now; see RetryInfo), FAILED_PRECONDITION (can never fit this machine),
   * UNAUTHENTICATED (no credentials, or unknown ones), PERMISSION_DENIED (another tenant's),
   * UNAVAILABLE (loading or draining), DEADLINE_EXCEEDED, CANCELLED, INTERNAL (a fault of the server).
   * A call without a deadline gets the one of its method: four hours where the model runs, ten minutes for
   * Tokenize and Detokenize, one minute for CacheStats (docs/methods.md).
   * </pre>
   */
  public static final class InferenceServiceFutureStub
      extends io.grpc.stub.AbstractFutureStub<InferenceServiceFutureStub> {
    private InferenceServiceFutureStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected InferenceServiceFutureStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new InferenceServiceFutureStub(channel, callOptions);
    }

    /**
     * <pre>
     * Generates and answers once, when the output is complete.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<dev.icehouse.v1.GenerateResponse> generate(
        dev.icehouse.v1.GenerateRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getGenerateMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * Turns a prompt into tokens exactly as Generate would.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<dev.icehouse.v1.TokenizeResponse> tokenize(
        dev.icehouse.v1.TokenizeRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getTokenizeMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * Turns tokens into text: the reverse of Tokenize.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<dev.icehouse.v1.DetokenizeResponse> detokenize(
        dev.icehouse.v1.DetokenizeRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getDetokenizeMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * Returns the counters of the prefix cache, taken between two steps. They cover all tenants, so with
     * authenticated callers only operators may call this; ServerService.GetStats shows each tenant its own share.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<dev.icehouse.v1.CacheStatsResponse> cacheStats(
        dev.icehouse.v1.CacheStatsRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getCacheStatsMethod(), getCallOptions()), request);
    }
  }

  private static final int METHODID_GENERATE = 0;
  private static final int METHODID_STREAM = 1;
  private static final int METHODID_TOKENIZE = 2;
  private static final int METHODID_DETOKENIZE = 3;
  private static final int METHODID_CACHE_STATS = 4;

  private static final class MethodHandlers<Req, Resp> implements
      io.grpc.stub.ServerCalls.UnaryMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.ServerStreamingMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.ClientStreamingMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.BidiStreamingMethod<Req, Resp> {
    private final AsyncService serviceImpl;
    private final int methodId;

    MethodHandlers(AsyncService serviceImpl, int methodId) {
      this.serviceImpl = serviceImpl;
      this.methodId = methodId;
    }

    @java.lang.Override
    @java.lang.SuppressWarnings("unchecked")
    public void invoke(Req request, io.grpc.stub.StreamObserver<Resp> responseObserver) {
      switch (methodId) {
        case METHODID_GENERATE:
          serviceImpl.generate((dev.icehouse.v1.GenerateRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.GenerateResponse>) responseObserver);
          break;
        case METHODID_STREAM:
          serviceImpl.stream((dev.icehouse.v1.GenerateRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.StreamResponse>) responseObserver);
          break;
        case METHODID_TOKENIZE:
          serviceImpl.tokenize((dev.icehouse.v1.TokenizeRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.TokenizeResponse>) responseObserver);
          break;
        case METHODID_DETOKENIZE:
          serviceImpl.detokenize((dev.icehouse.v1.DetokenizeRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.DetokenizeResponse>) responseObserver);
          break;
        case METHODID_CACHE_STATS:
          serviceImpl.cacheStats((dev.icehouse.v1.CacheStatsRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.CacheStatsResponse>) responseObserver);
          break;
        default:
          throw new AssertionError();
      }
    }

    @java.lang.Override
    @java.lang.SuppressWarnings("unchecked")
    public io.grpc.stub.StreamObserver<Req> invoke(
        io.grpc.stub.StreamObserver<Resp> responseObserver) {
      switch (methodId) {
        default:
          throw new AssertionError();
      }
    }
  }

  public static final io.grpc.ServerServiceDefinition bindService(AsyncService service) {
    return io.grpc.ServerServiceDefinition.builder(getServiceDescriptor())
        .addMethod(
          getGenerateMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              dev.icehouse.v1.GenerateRequest,
              dev.icehouse.v1.GenerateResponse>(
                service, METHODID_GENERATE)))
        .addMethod(
          getStreamMethod(),
          io.grpc.stub.ServerCalls.asyncServerStreamingCall(
            new MethodHandlers<
              dev.icehouse.v1.GenerateRequest,
              dev.icehouse.v1.StreamResponse>(
                service, METHODID_STREAM)))
        .addMethod(
          getTokenizeMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              dev.icehouse.v1.TokenizeRequest,
              dev.icehouse.v1.TokenizeResponse>(
                service, METHODID_TOKENIZE)))
        .addMethod(
          getDetokenizeMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              dev.icehouse.v1.DetokenizeRequest,
              dev.icehouse.v1.DetokenizeResponse>(
                service, METHODID_DETOKENIZE)))
        .addMethod(
          getCacheStatsMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              dev.icehouse.v1.CacheStatsRequest,
              dev.icehouse.v1.CacheStatsResponse>(
                service, METHODID_CACHE_STATS)))
        .build();
  }

  private static abstract class InferenceServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoFileDescriptorSupplier, io.grpc.protobuf.ProtoServiceDescriptorSupplier {
    InferenceServiceBaseDescriptorSupplier() {}

    @java.lang.Override
    public com.google.protobuf.Descriptors.FileDescriptor getFileDescriptor() {
      return dev.icehouse.v1.InferenceServiceOuterClass.getDescriptor();
    }

    @java.lang.Override
    public com.google.protobuf.Descriptors.ServiceDescriptor getServiceDescriptor() {
      return getFileDescriptor().findServiceByName("InferenceService");
    }
  }

  private static final class InferenceServiceFileDescriptorSupplier
      extends InferenceServiceBaseDescriptorSupplier {
    InferenceServiceFileDescriptorSupplier() {}
  }

  private static final class InferenceServiceMethodDescriptorSupplier
      extends InferenceServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoMethodDescriptorSupplier {
    private final java.lang.String methodName;

    InferenceServiceMethodDescriptorSupplier(java.lang.String methodName) {
      this.methodName = methodName;
    }

    @java.lang.Override
    public com.google.protobuf.Descriptors.MethodDescriptor getMethodDescriptor() {
      return getServiceDescriptor().findMethodByName(methodName);
    }
  }

  private static volatile io.grpc.ServiceDescriptor serviceDescriptor;

  public static io.grpc.ServiceDescriptor getServiceDescriptor() {
    io.grpc.ServiceDescriptor result = serviceDescriptor;
    if (result == null) {
      synchronized (InferenceServiceGrpc.class) {
        result = serviceDescriptor;
        if (result == null) {
          serviceDescriptor = result = io.grpc.ServiceDescriptor.newBuilder(SERVICE_NAME)
              .setSchemaDescriptor(new InferenceServiceFileDescriptorSupplier())
              .addMethod(getGenerateMethod())
              .addMethod(getStreamMethod())
              .addMethod(getTokenizeMethod())
              .addMethod(getDetokenizeMethod())
              .addMethod(getCacheStatsMethod())
              .build();
        }
      }
    }
    return result;
  }
}
