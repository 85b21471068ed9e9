package dev.icehouse.v1;

import static io.grpc.MethodDescriptor.generateFullMethodName;

/**
 * <pre>
 * Ranks documents with a model that is asked for each document whether it answers the query: rerankers
 * such as Qwen3-Reranker, trained to answer "yes" or "no", and any other model that follows instructions.
 * Models with a scoring head (cross-encoders such as bge-reranker, `kind` MODEL_KIND_RERANK) read query and
 * document as a pair instead, keep nothing in the cache and refuse instruction, form and answers. Errors carry google.rpc details as InferenceService's do.
 * </pre>
 */
@io.grpc.stub.annotations.GrpcGenerated
public final class RerankServiceGrpc {

  private RerankServiceGrpc() {}

  public static final java.lang.String SERVICE_NAME = "icehouse.v1.RerankService";

  // Static method descriptors that strictly reflect the proto.
  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.RerankRequest,
      dev.icehouse.v1.RerankResponse> getRerankMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Rerank",
      requestType = dev.icehouse.v1.RerankRequest.class,
      responseType = dev.icehouse.v1.RerankResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.RerankRequest,
      dev.icehouse.v1.RerankResponse> getRerankMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.RerankRequest, dev.icehouse.v1.RerankResponse> getRerankMethod;
    if ((getRerankMethod = RerankServiceGrpc.getRerankMethod) == null) {
      synchronized (RerankServiceGrpc.class) {
        if ((getRerankMethod = RerankServiceGrpc.getRerankMethod) == null) {
          RerankServiceGrpc.getRerankMethod = getRerankMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.RerankRequest, dev.icehouse.v1.RerankResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Rerank"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.RerankRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.RerankResponse.getDefaultInstance()))
              .setSchemaDescriptor(new RerankServiceMethodDescriptorSupplier("Rerank"))
              .build();
        }
      }
    }
    return getRerankMethod;
  }

  /**
   * Creates a new async stub that supports all call types for the service
   */
  public static RerankServiceStub newStub(io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<RerankServiceStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<RerankServiceStub>() {
        @java.lang.Override
        public RerankServiceStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new RerankServiceStub(channel, callOptions);
        }
      };
    return RerankServiceStub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports all types of calls on the service
   */
  public static RerankServiceBlockingV2Stub newBlockingV2Stub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<RerankServiceBlockingV2Stub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<RerankServiceBlockingV2Stub>() {
        @java.lang.Override
        public RerankServiceBlockingV2Stub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new RerankServiceBlockingV2Stub(channel, callOptions);
        }
      };
    return RerankServiceBlockingV2Stub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports unary and streaming output calls on the service
   */
  public static RerankServiceBlockingStub newBlockingStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<RerankServiceBlockingStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<RerankServiceBlockingStub>() {
        @java.lang.Override
        public RerankServiceBlockingStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new RerankServiceBlockingStub(channel, callOptions);
        }
      };
    return RerankServiceBlockingStub.newStub(factory, channel);
  }

  /**
   * Creates a new ListenableFuture-style stub that supports unary calls on the service
   */
  public static RerankServiceFutureStub newFutureStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<RerankServiceFutureStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<RerankServiceFutureStub>() {
        @java.lang.Override
        public RerankServiceFutureStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new RerankServiceFutureStub(channel, callOptions);
        }
      };
    return RerankServiceFutureStub.newStub(factory, channel);
  }

  /**
   * <pre>
   * Ranks documents with a model that is asked for each document whether it answers the query: rerankers
   * such as Qwen3-Reranker, trained to answer "yes" or "no", and any other model that follows instructions.
   * Models with a scoring head (cross-encoders such as bge-reranker, `kind` MODEL_KIND_RERANK) read query and
   * document as a pair instead, keep nothing in the cache and refuse instruction, form and answers. Errors carry google.rpc details as InferenceService's do.
   * </pre>
   */
  public interface AsyncService {

    /**
     * <pre>
     * Scores each document by the probabilities of two answers as the model's first token, and returns the documents
     * best first. Every document is one short request in the batch; they are accepted or refused together. Each
     * uses the prefix cache as Generate does: what comes before the document, such as a long query, is
     * computed once. Errors are those of InferenceService.Generate.
     * </pre>
     */
    default void rerank(dev.icehouse.v1.RerankRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.RerankResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getRerankMethod(), responseObserver);
    }
  }

  /**
   * Base class for the server implementation of the service RerankService.
   * <pre>
   * Ranks documents with a model that is asked for each document whether it answers the query: rerankers
   * such as Qwen3-Reranker, trained to answer "yes" or "no", and any other model that follows instructions.
   * Models with a scoring head (cross-encoders such as bge-reranker, `kind` MODEL_KIND_RERANK) read query and
   * document as a pair instead, keep nothing in the cache and refuse instruction, form and answers. Errors carry google.rpc details as InferenceService's do.
   * </pre>
   */
  public static abstract class RerankServiceImplBase
      implements io.grpc.BindableService, AsyncService {

    @java.lang.Override public final io.grpc.ServerServiceDefinition bindService() {
      return RerankServiceGrpc.bindService(this);
    }
  }

  /**
   * A stub to allow clients to do asynchronous rpc calls to service RerankService.
   * <pre>
   * Ranks documents with a model that is asked for each document whether it answers the query: rerankers
   * such as Qwen3-Reranker, trained to answer "yes" or "no", and any other model that follows instructions.
   * Models with a scoring head (cross-encoders such as bge-reranker, `kind` MODEL_KIND_RERANK) read query and
   * document as a pair instead, keep nothing in the cache and refuse instruction, form and answers. Errors carry google.rpc details as InferenceService's do.
   * </pre>
   */
  public static final class RerankServiceStub
      extends io.grpc.stub.AbstractAsyncStub<RerankServiceStub> {
    private RerankServiceStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected RerankServiceStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new RerankServiceStub(channel, callOptions);
    }

    /**
     * <pre>
     * Scores each document by the probabilities of two answers as the model's first token, and returns the documents
     * best first. Every document is one short request in the batch; they are accepted or refused together. Each
     * uses the prefix cache as Generate does: what comes before the document, such as a long query, is
     * computed once. Errors are those of InferenceService.Generate.
     * </pre>
     */
    public void rerank(dev.icehouse.v1.RerankRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.RerankResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getRerankMethod(), getCallOptions()), request, responseObserver);
    }
  }

  /**
   * A stub to allow clients to do synchronous rpc calls to service RerankService.
   * <pre>
   * Ranks documents with a model that is asked for each document whether it answers the query: rerankers
   * such as Qwen3-Reranker, trained to answer "yes" or "no", and any other model that follows instructions.
   * Models with a scoring head (cross-encoders such as bge-reranker, `kind` MODEL_KIND_RERANK) read query and
   * document as a pair instead, keep nothing in the cache and refuse instruction, form and answers. Errors carry google.rpc details as InferenceService's do.
   * </pre>
   */
  public static final class RerankServiceBlockingV2Stub
      extends io.grpc.stub.AbstractBlockingStub<RerankServiceBlockingV2Stub> {
    private RerankServiceBlockingV2Stub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected RerankServiceBlockingV2Stub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new RerankServiceBlockingV2Stub(channel, callOptions);
    }

    /**
     * <pre>
     * Scores each document by the probabilities of two answers as the model's first token, and returns the documents
     * best first. Every document is one short request in the batch; they are accepted or refused together. Each
     * uses the prefix cache as Generate does: what comes before the document, such as a long query, is
     * computed once. Errors are those of InferenceService.Generate.
     * </pre>
     */
    public dev.icehouse.v1.RerankResponse rerank(dev.icehouse.v1.RerankRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getRerankMethod(), getCallOptions(), request);
    }
  }

  /**
   * A stub to allow clients to do limited synchronous rpc calls to service RerankService.
   * <pre>
   * Ranks documents with a model that is asked for each document whether it answers the query: rerankers
   * such as Qwen3-Reranker, trained to answer "yes" or "no", and any other model that follows instructions.
   * Models with a scoring head (cross-encoders such as bge-reranker, `kind` MODEL_KIND_RERANK) read query and
   * document as a pair instead, keep nothing in the cache and refuse instruction, form and answers. Errors carry google.rpc details as InferenceService's do.
   * </pre>
   */
  public static final class RerankServiceBlockingStub
      extends io.grpc.stub.AbstractBlockingStub<RerankServiceBlockingStub> {
    private RerankServiceBlockingStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected RerankServiceBlockingStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new RerankServiceBlockingStub(channel, callOptions);
    }

    /**
     * <pre>
     * Scores each document by the probabilities of two answers as the model's first token, and returns the documents
     * best first. Every document is one short request in the batch; they are accepted or refused together. Each
     * uses the prefix cache as Generate does: what comes before the document, such as a long query, is
     * computed once. Errors are those of InferenceService.Generate.
     * </pre>
     */
    public dev.icehouse.v1.RerankResponse rerank(dev.icehouse.v1.RerankRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getRerankMethod(), getCallOptions(), request);
    }
  }

  /**
   * A stub to allow clients to do ListenableFuture-style rpc calls to service RerankService.
   * <pre>
   * Ranks documents with a model that is asked for each document whether it answers the query: rerankers
   * such as Qwen3-Reranker, trained to answer "yes" or "no", and any other model that follows instructions.
   * Models with a scoring head (cross-encoders such as bge-reranker, `kind` MODEL_KIND_RERANK) read query and
   * document as a pair instead, keep nothing in the cache and refuse instruction, form and answers. Errors carry google.rpc details as InferenceService's do.
   * </pre>
   */
  public static final class RerankServiceFutureStub
      extends io.grpc.stub.AbstractFutureStub<RerankServiceFutureStub> {
    private RerankServiceFutureStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected RerankServiceFutureStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new RerankServiceFutureStub(channel, callOptions);
    }

    /**
     * <pre>
     * Scores each document by the probabilities of two answers as the model's first token, and returns the documents
     * best first. Every document is one short request in the batch; they are accepted or refused together. Each
     * uses the prefix cache as Generate does: what comes before the document, such as a long query, is
     * computed once. Errors are those of InferenceService.Generate.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<dev.icehouse.v1.RerankResponse> rerank(
        dev.icehouse.v1.RerankRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getRerankMethod(), getCallOptions()), request);
    }
  }

  private static final int METHODID_RERANK = 0;

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
        case METHODID_RERANK:
          serviceImpl.rerank((dev.icehouse.v1.RerankRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.RerankResponse>) responseObserver);
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
          getRerankMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              dev.icehouse.v1.RerankRequest,
              dev.icehouse.v1.RerankResponse>(
                service, METHODID_RERANK)))
        .build();
  }

  private static abstract class RerankServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoFileDescriptorSupplier, io.grpc.protobuf.ProtoServiceDescriptorSupplier {
    RerankServiceBaseDescriptorSupplier() {}

    @java.lang.Override
    public com.google.protobuf.Descriptors.FileDescriptor getFileDescriptor() {
      return dev.icehouse.v1.RerankServiceOuterClass.getDescriptor();
    }

    @java.lang.Override
    public com.google.protobuf.Descriptors.ServiceDescriptor getServiceDescriptor() {
      return getFileDescriptor().findServiceByName("RerankService");
    }
  }

  private static final class RerankServiceFileDescriptorSupplier
      extends RerankServiceBaseDescriptorSupplier {
    RerankServiceFileDescriptorSupplier() {}
  }

  private static final class RerankServiceMethodDescriptorSupplier
      extends RerankServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoMethodDescriptorSupplier {
    private final java.lang.String methodName;

    RerankServiceMethodDescriptorSupplier(java.lang.String methodName) {
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
      synchronized (RerankServiceGrpc.class) {
        result = serviceDescriptor;
        if (result == null) {
          serviceDescriptor = result = io.grpc.ServiceDescriptor.newBuilder(SERVICE_NAME)
              .setSchemaDescriptor(new RerankServiceFileDescriptorSupplier())
              .addMethod(getRerankMethod())
              .build();
        }
      }
    }
    return result;
  }
}
