package dev.icehouse.v1;

import static io.grpc.MethodDescriptor.generateFullMethodName;

/**
 * <pre>
 * Lists, describes, loads and unloads the served models. Errors carry google.rpc details as InferenceService's do.
 * A server of several models loads one when a request names it; other models that are idle leave memory for it if
 * they must. A server of one model loads that at its start and keeps it.
 * </pre>
 */
@io.grpc.stub.annotations.GrpcGenerated
public final class ModelServiceGrpc {

  private ModelServiceGrpc() {}

  public static final java.lang.String SERVICE_NAME = "icehouse.v1.ModelService";

  // Static method descriptors that strictly reflect the proto.
  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.ListModelsRequest,
      dev.icehouse.v1.ListModelsResponse> getListModelsMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "ListModels",
      requestType = dev.icehouse.v1.ListModelsRequest.class,
      responseType = dev.icehouse.v1.ListModelsResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.ListModelsRequest,
      dev.icehouse.v1.ListModelsResponse> getListModelsMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.ListModelsRequest, dev.icehouse.v1.ListModelsResponse> getListModelsMethod;
    if ((getListModelsMethod = ModelServiceGrpc.getListModelsMethod) == null) {
      synchronized (ModelServiceGrpc.class) {
        if ((getListModelsMethod = ModelServiceGrpc.getListModelsMethod) == null) {
          ModelServiceGrpc.getListModelsMethod = getListModelsMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.ListModelsRequest, dev.icehouse.v1.ListModelsResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "ListModels"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.ListModelsRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.ListModelsResponse.getDefaultInstance()))
              .setSchemaDescriptor(new ModelServiceMethodDescriptorSupplier("ListModels"))
              .build();
        }
      }
    }
    return getListModelsMethod;
  }

  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.GetModelRequest,
      dev.icehouse.v1.GetModelResponse> getGetModelMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "GetModel",
      requestType = dev.icehouse.v1.GetModelRequest.class,
      responseType = dev.icehouse.v1.GetModelResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.GetModelRequest,
      dev.icehouse.v1.GetModelResponse> getGetModelMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.GetModelRequest, dev.icehouse.v1.GetModelResponse> getGetModelMethod;
    if ((getGetModelMethod = ModelServiceGrpc.getGetModelMethod) == null) {
      synchronized (ModelServiceGrpc.class) {
        if ((getGetModelMethod = ModelServiceGrpc.getGetModelMethod) == null) {
          ModelServiceGrpc.getGetModelMethod = getGetModelMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.GetModelRequest, dev.icehouse.v1.GetModelResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "GetModel"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.GetModelRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.GetModelResponse.getDefaultInstance()))
              .setSchemaDescriptor(new ModelServiceMethodDescriptorSupplier("GetModel"))
              .build();
        }
      }
    }
    return getGetModelMethod;
  }

  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.LoadModelRequest,
      dev.icehouse.v1.LoadModelResponse> getLoadModelMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "LoadModel",
      requestType = dev.icehouse.v1.LoadModelRequest.class,
      responseType = dev.icehouse.v1.LoadModelResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.LoadModelRequest,
      dev.icehouse.v1.LoadModelResponse> getLoadModelMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.LoadModelRequest, dev.icehouse.v1.LoadModelResponse> getLoadModelMethod;
    if ((getLoadModelMethod = ModelServiceGrpc.getLoadModelMethod) == null) {
      synchronized (ModelServiceGrpc.class) {
        if ((getLoadModelMethod = ModelServiceGrpc.getLoadModelMethod) == null) {
          ModelServiceGrpc.getLoadModelMethod = getLoadModelMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.LoadModelRequest, dev.icehouse.v1.LoadModelResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "LoadModel"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.LoadModelRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.LoadModelResponse.getDefaultInstance()))
              .setSchemaDescriptor(new ModelServiceMethodDescriptorSupplier("LoadModel"))
              .build();
        }
      }
    }
    return getLoadModelMethod;
  }

  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.UnloadModelRequest,
      dev.icehouse.v1.UnloadModelResponse> getUnloadModelMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "UnloadModel",
      requestType = dev.icehouse.v1.UnloadModelRequest.class,
      responseType = dev.icehouse.v1.UnloadModelResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.UnloadModelRequest,
      dev.icehouse.v1.UnloadModelResponse> getUnloadModelMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.UnloadModelRequest, dev.icehouse.v1.UnloadModelResponse> getUnloadModelMethod;
    if ((getUnloadModelMethod = ModelServiceGrpc.getUnloadModelMethod) == null) {
      synchronized (ModelServiceGrpc.class) {
        if ((getUnloadModelMethod = ModelServiceGrpc.getUnloadModelMethod) == null) {
          ModelServiceGrpc.getUnloadModelMethod = getUnloadModelMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.UnloadModelRequest, dev.icehouse.v1.UnloadModelResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "UnloadModel"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.UnloadModelRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.UnloadModelResponse.getDefaultInstance()))
              .setSchemaDescriptor(new ModelServiceMethodDescriptorSupplier("UnloadModel"))
              .build();
        }
      }
    }
    return getUnloadModelMethod;
  }

  /**
   * Creates a new async stub that supports all call types for the service
   */
  public static ModelServiceStub newStub(io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<ModelServiceStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<ModelServiceStub>() {
        @java.lang.Override
        public ModelServiceStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new ModelServiceStub(channel, callOptions);
        }
      };
    return ModelServiceStub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports all types of calls on the service
   */
  public static ModelServiceBlockingV2Stub newBlockingV2Stub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<ModelServiceBlockingV2Stub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<ModelServiceBlockingV2Stub>() {
        @java.lang.Override
        public ModelServiceBlockingV2Stub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new ModelServiceBlockingV2Stub(channel, callOptions);
        }
      };
    return ModelServiceBlockingV2Stub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports unary and streaming output calls on the service
   */
  public static ModelServiceBlockingStub newBlockingStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<ModelServiceBlockingStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<ModelServiceBlockingStub>() {
        @java.lang.Override
        public ModelServiceBlockingStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new ModelServiceBlockingStub(channel, callOptions);
        }
      };
    return ModelServiceBlockingStub.newStub(factory, channel);
  }

  /**
   * Creates a new ListenableFuture-style stub that supports unary calls on the service
   */
  public static ModelServiceFutureStub newFutureStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<ModelServiceFutureStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<ModelServiceFutureStub>() {
        @java.lang.Override
        public ModelServiceFutureStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new ModelServiceFutureStub(channel, callOptions);
        }
      };
    return ModelServiceFutureStub.newStub(factory, channel);
  }

  /**
   * <pre>
   * Lists, describes, loads and unloads the served models. Errors carry google.rpc details as InferenceService's do.
   * A server of several models loads one when a request names it; other models that are idle leave memory for it if
   * they must. A server of one model loads that at its start and keeps it.
   * </pre>
   */
  public interface AsyncService {

    /**
     * <pre>
     * Lists the models that `model` may name, loaded or not; a model that is kept for other tenants is not shown.
     * INVALID_ARGUMENT for a negative page size or a bad token; UNAVAILABLE while the only model loads.
     * </pre>
     */
    default void listModels(dev.icehouse.v1.ListModelsRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.ListModelsResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getListModelsMethod(), responseObserver);
    }

    /**
     * <pre>
     * Describes one model. NOT_FOUND if it is not served; UNAVAILABLE while the only model loads.
     * </pre>
     */
    default void getModel(dev.icehouse.v1.GetModelRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.GetModelResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getGetModelMethod(), responseObserver);
    }

    /**
     * <pre>
     * Loads a model, as a request for it would: any number of `progress`, and `done` once, last. When the caller
     * leaves, loading goes on. RESOURCE_EXHAUSTED (MEMORY_SHORT) if running models take the memory, FAILED_PRECONDITION
     * (MEMORY_NEVER_FITS) if pinned ones do or it can never fit. Only for operators.
     * </pre>
     */
    default void loadModel(dev.icehouse.v1.LoadModelRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.LoadModelResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getLoadModelMethod(), responseObserver);
    }

    /**
     * <pre>
     * Unloads a model, once its running requests have ended or the server's drain grace is over, which ends them as
     * UNAVAILABLE. Its blocks are written to SSD, and the next request that names it loads it again. Returns at once
     * if it is not loaded; INVALID_ARGUMENT (UNSUPPORTED) for the only model. Only for operators.
     * </pre>
     */
    default void unloadModel(dev.icehouse.v1.UnloadModelRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.UnloadModelResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getUnloadModelMethod(), responseObserver);
    }
  }

  /**
   * Base class for the server implementation of the service ModelService.
   * <pre>
   * Lists, describes, loads and unloads the served models. Errors carry google.rpc details as InferenceService's do.
   * A server of several models loads one when a request names it; other models that are idle leave memory for it if
   * they must. A server of one model loads that at its start and keeps it.
   * </pre>
   */
  public static abstract class ModelServiceImplBase
      implements io.grpc.BindableService, AsyncService {

    @java.lang.Override public final io.grpc.ServerServiceDefinition bindService() {
      return ModelServiceGrpc.bindService(this);
    }
  }

  /**
   * A stub to allow clients to do asynchronous rpc calls to service ModelService.
   * <pre>
   * Lists, describes, loads and unloads the served models. Errors carry google.rpc details as InferenceService's do.
   * A server of several models loads one when a request names it; other models that are idle leave memory for it if
   * they must. A server of one model loads that at its start and keeps it.
   * </pre>
   */
  public static final class ModelServiceStub
      extends io.grpc.stub.AbstractAsyncStub<ModelServiceStub> {
    private ModelServiceStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected ModelServiceStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new ModelServiceStub(channel, callOptions);
    }

    /**
     * <pre>
     * Lists the models that `model` may name, loaded or not; a model that is kept for other tenants is not shown.
     * INVALID_ARGUMENT for a negative page size or a bad token; UNAVAILABLE while the only model loads.
     * </pre>
     */
    public void listModels(dev.icehouse.v1.ListModelsRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.ListModelsResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getListModelsMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Describes one model. NOT_FOUND if it is not served; UNAVAILABLE while the only model loads.
     * </pre>
     */
    public void getModel(dev.icehouse.v1.GetModelRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.GetModelResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getGetModelMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Loads a model, as a request for it would: any number of `progress`, and `done` once, last. When the caller
     * leaves, loading goes on. RESOURCE_EXHAUSTED (MEMORY_SHORT) if running models take the memory, FAILED_PRECONDITION
     * (MEMORY_NEVER_FITS) if pinned ones do or it can never fit. Only for operators.
     * </pre>
     */
    public void loadModel(dev.icehouse.v1.LoadModelRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.LoadModelResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncServerStreamingCall(
          getChannel().newCall(getLoadModelMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Unloads a model, once its running requests have ended or the server's drain grace is over, which ends them as
     * UNAVAILABLE. Its blocks are written to SSD, and the next request that names it loads it again. Returns at once
     * if it is not loaded; INVALID_ARGUMENT (UNSUPPORTED) for the only model. Only for operators.
     * </pre>
     */
    public void unloadModel(dev.icehouse.v1.UnloadModelRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.UnloadModelResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getUnloadModelMethod(), getCallOptions()), request, responseObserver);
    }
  }

  /**
   * A stub to allow clients to do synchronous rpc calls to service ModelService.
   * <pre>
   * Lists, describes, loads and unloads the served models. Errors carry google.rpc details as InferenceService's do.
   * A server of several models loads one when a request names it; other models that are idle leave memory for it if
   * they must. A server of one model loads that at its start and keeps it.
   * </pre>
   */
  public static final class ModelServiceBlockingV2Stub
      extends io.grpc.stub.AbstractBlockingStub<ModelServiceBlockingV2Stub> {
    private ModelServiceBlockingV2Stub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected ModelServiceBlockingV2Stub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new ModelServiceBlockingV2Stub(channel, callOptions);
    }

    /**
     * <pre>
     * Lists the models that `model` may name, loaded or not; a model that is kept for other tenants is not shown.
     * INVALID_ARGUMENT for a negative page size or a bad token; UNAVAILABLE while the only model loads.
     * </pre>
     */
    public dev.icehouse.v1.ListModelsResponse listModels(dev.icehouse.v1.ListModelsRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getListModelsMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Describes one model. NOT_FOUND if it is not served; UNAVAILABLE while the only model loads.
     * </pre>
     */
    public dev.icehouse.v1.GetModelResponse getModel(dev.icehouse.v1.GetModelRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getGetModelMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Loads a model, as a request for it would: any number of `progress`, and `done` once, last. When the caller
     * leaves, loading goes on. RESOURCE_EXHAUSTED (MEMORY_SHORT) if running models take the memory, FAILED_PRECONDITION
     * (MEMORY_NEVER_FITS) if pinned ones do or it can never fit. Only for operators.
     * </pre>
     */
    @io.grpc.ExperimentalApi("https://github.com/grpc/grpc-java/issues/10918")
    public io.grpc.stub.BlockingClientCall<?, dev.icehouse.v1.LoadModelResponse>
        loadModel(dev.icehouse.v1.LoadModelRequest request) {
      return io.grpc.stub.ClientCalls.blockingV2ServerStreamingCall(
          getChannel(), getLoadModelMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Unloads a model, once its running requests have ended or the server's drain grace is over, which ends them as
     * UNAVAILABLE. Its blocks are written to SSD, and the next request that names it loads it again. Returns at once
     * if it is not loaded; INVALID_ARGUMENT (UNSUPPORTED) for the only model. Only for operators.
     * </pre>
     */
    public dev.icehouse.v1.UnloadModelResponse unloadModel(dev.icehouse.v1.UnloadModelRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getUnloadModelMethod(), getCallOptions(), request);
    }
  }

  /**
   * A stub to allow clients to do limited synchronous rpc calls to service ModelService.
   * <pre>
   * Lists, describes, loads and unloads the served models. Errors carry google.rpc details as InferenceService's do.
   * A server of several models loads one when a request names it; other models that are idle leave memory for it if
   * they must. A server of one model loads that at its start and keeps it.
   * </pre>
   */
  public static final class ModelServiceBlockingStub
      extends io.grpc.stub.AbstractBlockingStub<ModelServiceBlockingStub> {
    private ModelServiceBlockingStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected ModelServiceBlockingStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new ModelServiceBlockingStub(channel, callOptions);
    }

    /**
     * <pre>
     * Lists the models that `model` may name, loaded or not; a model that is kept for other tenants is not shown.
     * INVALID_ARGUMENT for a negative page size or a bad token; UNAVAILABLE while the only model loads.
     * </pre>
     */
    public dev.icehouse.v1.ListModelsResponse listModels(dev.icehouse.v1.ListModelsRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getListModelsMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Describes one model. NOT_FOUND if it is not served; UNAVAILABLE while the only model loads.
     * </pre>
     */
    public dev.icehouse.v1.GetModelResponse getModel(dev.icehouse.v1.GetModelRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getGetModelMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Loads a model, as a request for it would: any number of `progress`, and `done` once, last. When the caller
     * leaves, loading goes on. RESOURCE_EXHAUSTED (MEMORY_SHORT) if running models take the memory, FAILED_PRECONDITION
     * (MEMORY_NEVER_FITS) if pinned ones do or it can never fit. Only for operators.
     * </pre>
     */
    public java.util.Iterator<dev.icehouse.v1.LoadModelResponse> loadModel(
        dev.icehouse.v1.LoadModelRequest request) {
      return io.grpc.stub.ClientCalls.blockingServerStreamingCall(
          getChannel(), getLoadModelMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Unloads a model, once its running requests have ended or the server's drain grace is over, which ends them as
     * UNAVAILABLE. Its blocks are written to SSD, and the next request that names it loads it again. Returns at once
     * if it is not loaded; INVALID_ARGUMENT (UNSUPPORTED) for the only model. Only for operators.
     * </pre>
     */
    public dev.icehouse.v1.UnloadModelResponse unloadModel(dev.icehouse.v1.UnloadModelRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getUnloadModelMethod(), getCallOptions(), request);
    }
  }

  /**
   * A stub to allow clients to do ListenableFuture-style rpc calls to service ModelService.
   * <pre>
   * Lists, describes, loads and unloads the served models. Errors carry google.rpc details as InferenceService's do.
   * A server of several models loads one when a request names it; other models that are idle leave memory for it if
   * they must. A server of one model loads that at its start and keeps it.
   * </pre>
   */
  public static final class ModelServiceFutureStub
      extends io.grpc.stub.AbstractFutureStub<ModelServiceFutureStub> {
    private ModelServiceFutureStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected ModelServiceFutureStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new ModelServiceFutureStub(channel, callOptions);
    }

    /**
     * <pre>
     * Lists the models that `model` may name, loaded or not; a model that is kept for other tenants is not shown.
     * INVALID_ARGUMENT for a negative page size or a bad token; UNAVAILABLE while the only model loads.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<dev.icehouse.v1.ListModelsResponse> listModels(
        dev.icehouse.v1.ListModelsRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getListModelsMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * Describes one model. NOT_FOUND if it is not served; UNAVAILABLE while the only model loads.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<dev.icehouse.v1.GetModelResponse> getModel(
        dev.icehouse.v1.GetModelRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getGetModelMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * Unloads a model, once its running requests have ended or the server's drain grace is over, which ends them as
     * UNAVAILABLE. Its blocks are written to SSD, and the next request that names it loads it again. Returns at once
     * if it is not loaded; INVALID_ARGUMENT (UNSUPPORTED) for the only model. Only for operators.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<dev.icehouse.v1.UnloadModelResponse> unloadModel(
        dev.icehouse.v1.UnloadModelRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getUnloadModelMethod(), getCallOptions()), request);
    }
  }

  private static final int METHODID_LIST_MODELS = 0;
  private static final int METHODID_GET_MODEL = 1;
  private static final int METHODID_LOAD_MODEL = 2;
  private static final int METHODID_UNLOAD_MODEL = 3;

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
        case METHODID_LIST_MODELS:
          serviceImpl.listModels((dev.icehouse.v1.ListModelsRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.ListModelsResponse>) responseObserver);
          break;
        case METHODID_GET_MODEL:
          serviceImpl.getModel((dev.icehouse.v1.GetModelRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.GetModelResponse>) responseObserver);
          break;
        case METHODID_LOAD_MODEL:
          serviceImpl.loadModel((dev.icehouse.v1.LoadModelRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.LoadModelResponse>) responseObserver);
          break;
        case METHODID_UNLOAD_MODEL:
          serviceImpl.unloadModel((dev.icehouse.v1.UnloadModelRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.UnloadModelResponse>) responseObserver);
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
          getListModelsMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              dev.icehouse.v1.ListModelsRequest,
              dev.icehouse.v1.ListModelsResponse>(
                service, METHODID_LIST_MODELS)))
        .addMethod(
          getGetModelMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              dev.icehouse.v1.GetModelRequest,
              dev.icehouse.v1.GetModelResponse>(
                service, METHODID_GET_MODEL)))
        .addMethod(
          getLoadModelMethod(),
          io.grpc.stub.ServerCalls.asyncServerStreamingCall(
            new MethodHandlers<
              dev.icehouse.v1.LoadModelRequest,
              dev.icehouse.v1.LoadModelResponse>(
                service, METHODID_LOAD_MODEL)))
        .addMethod(
          getUnloadModelMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              dev.icehouse.v1.UnloadModelRequest,
              dev.icehouse.v1.UnloadModelResponse>(
                service, METHODID_UNLOAD_MODEL)))
        .build();
  }

  private static abstract class ModelServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoFileDescriptorSupplier, io.grpc.protobuf.ProtoServiceDescriptorSupplier {
    ModelServiceBaseDescriptorSupplier() {}

    @java.lang.Override
    public com.google.protobuf.Descriptors.FileDescriptor getFileDescriptor() {
      return dev.icehouse.v1.ModelServiceOuterClass.getDescriptor();
    }

    @java.lang.Override
    public com.google.protobuf.Descriptors.ServiceDescriptor getServiceDescriptor() {
      return getFileDescriptor().findServiceByName("ModelService");
    }
  }

  private static final class ModelServiceFileDescriptorSupplier
      extends ModelServiceBaseDescriptorSupplier {
    ModelServiceFileDescriptorSupplier() {}
  }

  private static final class ModelServiceMethodDescriptorSupplier
      extends ModelServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoMethodDescriptorSupplier {
    private final java.lang.String methodName;

    ModelServiceMethodDescriptorSupplier(java.lang.String methodName) {
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
      synchronized (ModelServiceGrpc.class) {
        result = serviceDescriptor;
        if (result == null) {
          serviceDescriptor = result = io.grpc.ServiceDescriptor.newBuilder(SERVICE_NAME)
              .setSchemaDescriptor(new ModelServiceFileDescriptorSupplier())
              .addMethod(getListModelsMethod())
              .addMethod(getGetModelMethod())
              .addMethod(getLoadModelMethod())
              .addMethod(getUnloadModelMethod())
              .build();
        }
      }
    }
    return result;
  }
}
