package dev.icehouse.v1;

import static io.grpc.MethodDescriptor.generateFullMethodName;

/**
 * <pre>
 * Turns texts into vectors: the hidden states of a model, pooled, and what the model's folder puts behind that.
 * Errors carry google.rpc details as InferenceService's do.
 * </pre>
 */
@io.grpc.stub.annotations.GrpcGenerated
public final class EmbeddingServiceGrpc {

  private EmbeddingServiceGrpc() {}

  public static final java.lang.String SERVICE_NAME = "icehouse.v1.EmbeddingService";

  // Static method descriptors that strictly reflect the proto.
  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.EmbedRequest,
      dev.icehouse.v1.EmbedResponse> getEmbedMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Embed",
      requestType = dev.icehouse.v1.EmbedRequest.class,
      responseType = dev.icehouse.v1.EmbedResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.EmbedRequest,
      dev.icehouse.v1.EmbedResponse> getEmbedMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.EmbedRequest, dev.icehouse.v1.EmbedResponse> getEmbedMethod;
    if ((getEmbedMethod = EmbeddingServiceGrpc.getEmbedMethod) == null) {
      synchronized (EmbeddingServiceGrpc.class) {
        if ((getEmbedMethod = EmbeddingServiceGrpc.getEmbedMethod) == null) {
          EmbeddingServiceGrpc.getEmbedMethod = getEmbedMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.EmbedRequest, dev.icehouse.v1.EmbedResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Embed"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.EmbedRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.EmbedResponse.getDefaultInstance()))
              .setSchemaDescriptor(new EmbeddingServiceMethodDescriptorSupplier("Embed"))
              .build();
        }
      }
    }
    return getEmbedMethod;
  }

  /**
   * Creates a new async stub that supports all call types for the service
   */
  public static EmbeddingServiceStub newStub(io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<EmbeddingServiceStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<EmbeddingServiceStub>() {
        @java.lang.Override
        public EmbeddingServiceStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new EmbeddingServiceStub(channel, callOptions);
        }
      };
    return EmbeddingServiceStub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports all types of calls on the service
   */
  public static EmbeddingServiceBlockingV2Stub newBlockingV2Stub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<EmbeddingServiceBlockingV2Stub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<EmbeddingServiceBlockingV2Stub>() {
        @java.lang.Override
        public EmbeddingServiceBlockingV2Stub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new EmbeddingServiceBlockingV2Stub(channel, callOptions);
        }
      };
    return EmbeddingServiceBlockingV2Stub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports unary and streaming output calls on the service
   */
  public static EmbeddingServiceBlockingStub newBlockingStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<EmbeddingServiceBlockingStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<EmbeddingServiceBlockingStub>() {
        @java.lang.Override
        public EmbeddingServiceBlockingStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new EmbeddingServiceBlockingStub(channel, callOptions);
        }
      };
    return EmbeddingServiceBlockingStub.newStub(factory, channel);
  }

  /**
   * Creates a new ListenableFuture-style stub that supports unary calls on the service
   */
  public static EmbeddingServiceFutureStub newFutureStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<EmbeddingServiceFutureStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<EmbeddingServiceFutureStub>() {
        @java.lang.Override
        public EmbeddingServiceFutureStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new EmbeddingServiceFutureStub(channel, callOptions);
        }
      };
    return EmbeddingServiceFutureStub.newStub(factory, channel);
  }

  /**
   * <pre>
   * Turns texts into vectors: the hidden states of a model, pooled, and what the model's folder puts behind that.
   * Errors carry google.rpc details as InferenceService's do.
   * </pre>
   */
  public interface AsyncService {

    /**
     * <pre>
     * Embeds several inputs. They are computed in slices between the decode steps of other requests, and
     * accepted or refused together. FAILED_PRECONDITION (EMBEDDING_UNSUPPORTED) where the model does not expose its
     * hidden states; otherwise the errors of InferenceService.Generate.
     * </pre>
     */
    default void embed(dev.icehouse.v1.EmbedRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.EmbedResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getEmbedMethod(), responseObserver);
    }
  }

  /**
   * Base class for the server implementation of the service EmbeddingService.
   * <pre>
   * Turns texts into vectors: the hidden states of a model, pooled, and what the model's folder puts behind that.
   * Errors carry google.rpc details as InferenceService's do.
   * </pre>
   */
  public static abstract class EmbeddingServiceImplBase
      implements io.grpc.BindableService, AsyncService {

    @java.lang.Override public final io.grpc.ServerServiceDefinition bindService() {
      return EmbeddingServiceGrpc.bindService(this);
    }
  }

  /**
   * A stub to allow clients to do asynchronous rpc calls to service EmbeddingService.
   * <pre>
   * Turns texts into vectors: the hidden states of a model, pooled, and what the model's folder puts behind that.
   * Errors carry google.rpc details as InferenceService's do.
   * </pre>
   */
  public static final class EmbeddingServiceStub
      extends io.grpc.stub.AbstractAsyncStub<EmbeddingServiceStub> {
    private EmbeddingServiceStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected EmbeddingServiceStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new EmbeddingServiceStub(channel, callOptions);
    }

    /**
     * <pre>
     * Embeds several inputs. They are computed in slices between the decode steps of other requests, and
     * accepted or refused together. FAILED_PRECONDITION (EMBEDDING_UNSUPPORTED) where the model does not expose its
     * hidden states; otherwise the errors of InferenceService.Generate.
     * </pre>
     */
    public void embed(dev.icehouse.v1.EmbedRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.EmbedResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getEmbedMethod(), getCallOptions()), request, responseObserver);
    }
  }

  /**
   * A stub to allow clients to do synchronous rpc calls to service EmbeddingService.
   * <pre>
   * Turns texts into vectors: the hidden states of a model, pooled, and what the model's folder puts behind that.
   * Errors carry google.rpc details as InferenceService's do.
   * </pre>
   */
  public static final class EmbeddingServiceBlockingV2Stub
      extends io.grpc.stub.AbstractBlockingStub<EmbeddingServiceBlockingV2Stub> {
    private EmbeddingServiceBlockingV2Stub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected EmbeddingServiceBlockingV2Stub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new EmbeddingServiceBlockingV2Stub(channel, callOptions);
    }

    /**
     * <pre>
     * Embeds several inputs. They are computed in slices between the decode steps of other requests, and
     * accepted or refused together. FAILED_PRECONDITION (EMBEDDING_UNSUPPORTED) where the model does not expose its
     * hidden states; otherwise the errors of InferenceService.Generate.
     * </pre>
     */
    public dev.icehouse.v1.EmbedResponse embed(dev.icehouse.v1.EmbedRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getEmbedMethod(), getCallOptions(), request);
    }
  }

  /**
   * A stub to allow clients to do limited synchronous rpc calls to service EmbeddingService.
   * <pre>
   * Turns texts into vectors: the hidden states of a model, pooled, and what the model's folder puts behind that.
   * Errors carry google.rpc details as InferenceService's do.
   * </pre>
   */
  public static final class EmbeddingServiceBlockingStub
      extends io.grpc.stub.AbstractBlockingStub<EmbeddingServiceBlockingStub> {
    private EmbeddingServiceBlockingStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected EmbeddingServiceBlockingStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new EmbeddingServiceBlockingStub(channel, callOptions);
    }

    /**
     * <pre>
     * Embeds several inputs. They are computed in slices between the decode steps of other requests, and
     * accepted or refused together. FAILED_PRECONDITION (EMBEDDING_UNSUPPORTED) where the model does not expose its
     * hidden states; otherwise the errors of InferenceService.Generate.
     * </pre>
     */
    public dev.icehouse.v1.EmbedResponse embed(dev.icehouse.v1.EmbedRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getEmbedMethod(), getCallOptions(), request);
    }
  }

  /**
   * A stub to allow clients to do ListenableFuture-style rpc calls to service EmbeddingService.
   * <pre>
   * Turns texts into vectors: the hidden states of a model, pooled, and what the model's folder puts behind that.
   * Errors carry google.rpc details as InferenceService's do.
   * </pre>
   */
  public static final class EmbeddingServiceFutureStub
      extends io.grpc.stub.AbstractFutureStub<EmbeddingServiceFutureStub> {
    private EmbeddingServiceFutureStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected EmbeddingServiceFutureStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new EmbeddingServiceFutureStub(channel, callOptions);
    }

    /**
     * <pre>
     * Embeds several inputs. They are computed in slices between the decode steps of other requests, and
     * accepted or refused together. FAILED_PRECONDITION (EMBEDDING_UNSUPPORTED) where the model does not expose its
     * hidden states; otherwise the errors of InferenceService.Generate.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<dev.icehouse.v1.EmbedResponse> embed(
        dev.icehouse.v1.EmbedRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getEmbedMethod(), getCallOptions()), request);
    }
  }

  private static final int METHODID_EMBED = 0;

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
        case METHODID_EMBED:
          serviceImpl.embed((dev.icehouse.v1.EmbedRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.EmbedResponse>) responseObserver);
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
          getEmbedMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              dev.icehouse.v1.EmbedRequest,
              dev.icehouse.v1.EmbedResponse>(
                service, METHODID_EMBED)))
        .build();
  }

  private static abstract class EmbeddingServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoFileDescriptorSupplier, io.grpc.protobuf.ProtoServiceDescriptorSupplier {
    EmbeddingServiceBaseDescriptorSupplier() {}

    @java.lang.Override
    public com.google.protobuf.Descriptors.FileDescriptor getFileDescriptor() {
      return dev.icehouse.v1.EmbeddingServiceOuterClass.getDescriptor();
    }

    @java.lang.Override
    public com.google.protobuf.Descriptors.ServiceDescriptor getServiceDescriptor() {
      return getFileDescriptor().findServiceByName("EmbeddingService");
    }
  }

  private static final class EmbeddingServiceFileDescriptorSupplier
      extends EmbeddingServiceBaseDescriptorSupplier {
    EmbeddingServiceFileDescriptorSupplier() {}
  }

  private static final class EmbeddingServiceMethodDescriptorSupplier
      extends EmbeddingServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoMethodDescriptorSupplier {
    private final java.lang.String methodName;

    EmbeddingServiceMethodDescriptorSupplier(java.lang.String methodName) {
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
      synchronized (EmbeddingServiceGrpc.class) {
        result = serviceDescriptor;
        if (result == null) {
          serviceDescriptor = result = io.grpc.ServiceDescriptor.newBuilder(SERVICE_NAME)
              .setSchemaDescriptor(new EmbeddingServiceFileDescriptorSupplier())
              .addMethod(getEmbedMethod())
              .build();
        }
      }
    }
    return result;
  }
}
