package dev.icehouse.v1;

import static io.grpc.MethodDescriptor.generateFullMethodName;

/**
 * <pre>
 * Describes a server and what it is doing, and cancels requests. Errors carry google.rpc details as
 * InferenceService's do. Authenticated callers see and cancel only their own tenant's requests, operators those
 * of all tenants. A server knows only its own requests: behind a load balancer, ask each replica.
 * </pre>
 */
@io.grpc.stub.annotations.GrpcGenerated
public final class ServerServiceGrpc {

  private ServerServiceGrpc() {}

  public static final java.lang.String SERVICE_NAME = "icehouse.v1.ServerService";

  // Static method descriptors that strictly reflect the proto.
  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.GetServerRequest,
      dev.icehouse.v1.GetServerResponse> getGetServerMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "GetServer",
      requestType = dev.icehouse.v1.GetServerRequest.class,
      responseType = dev.icehouse.v1.GetServerResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.GetServerRequest,
      dev.icehouse.v1.GetServerResponse> getGetServerMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.GetServerRequest, dev.icehouse.v1.GetServerResponse> getGetServerMethod;
    if ((getGetServerMethod = ServerServiceGrpc.getGetServerMethod) == null) {
      synchronized (ServerServiceGrpc.class) {
        if ((getGetServerMethod = ServerServiceGrpc.getGetServerMethod) == null) {
          ServerServiceGrpc.getGetServerMethod = getGetServerMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.GetServerRequest, dev.icehouse.v1.GetServerResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "GetServer"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.GetServerRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.GetServerResponse.getDefaultInstance()))
              .setSchemaDescriptor(new ServerServiceMethodDescriptorSupplier("GetServer"))
              .build();
        }
      }
    }
    return getGetServerMethod;
  }

  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.GetStatsRequest,
      dev.icehouse.v1.GetStatsResponse> getGetStatsMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "GetStats",
      requestType = dev.icehouse.v1.GetStatsRequest.class,
      responseType = dev.icehouse.v1.GetStatsResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.GetStatsRequest,
      dev.icehouse.v1.GetStatsResponse> getGetStatsMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.GetStatsRequest, dev.icehouse.v1.GetStatsResponse> getGetStatsMethod;
    if ((getGetStatsMethod = ServerServiceGrpc.getGetStatsMethod) == null) {
      synchronized (ServerServiceGrpc.class) {
        if ((getGetStatsMethod = ServerServiceGrpc.getGetStatsMethod) == null) {
          ServerServiceGrpc.getGetStatsMethod = getGetStatsMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.GetStatsRequest, dev.icehouse.v1.GetStatsResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "GetStats"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.GetStatsRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.GetStatsResponse.getDefaultInstance()))
              .setSchemaDescriptor(new ServerServiceMethodDescriptorSupplier("GetStats"))
              .build();
        }
      }
    }
    return getGetStatsMethod;
  }

  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.WatchStatsRequest,
      dev.icehouse.v1.WatchStatsResponse> getWatchStatsMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "WatchStats",
      requestType = dev.icehouse.v1.WatchStatsRequest.class,
      responseType = dev.icehouse.v1.WatchStatsResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.WatchStatsRequest,
      dev.icehouse.v1.WatchStatsResponse> getWatchStatsMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.WatchStatsRequest, dev.icehouse.v1.WatchStatsResponse> getWatchStatsMethod;
    if ((getWatchStatsMethod = ServerServiceGrpc.getWatchStatsMethod) == null) {
      synchronized (ServerServiceGrpc.class) {
        if ((getWatchStatsMethod = ServerServiceGrpc.getWatchStatsMethod) == null) {
          ServerServiceGrpc.getWatchStatsMethod = getWatchStatsMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.WatchStatsRequest, dev.icehouse.v1.WatchStatsResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "WatchStats"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.WatchStatsRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.WatchStatsResponse.getDefaultInstance()))
              .setSchemaDescriptor(new ServerServiceMethodDescriptorSupplier("WatchStats"))
              .build();
        }
      }
    }
    return getWatchStatsMethod;
  }

  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.ListRequestsRequest,
      dev.icehouse.v1.ListRequestsResponse> getListRequestsMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "ListRequests",
      requestType = dev.icehouse.v1.ListRequestsRequest.class,
      responseType = dev.icehouse.v1.ListRequestsResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.ListRequestsRequest,
      dev.icehouse.v1.ListRequestsResponse> getListRequestsMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.ListRequestsRequest, dev.icehouse.v1.ListRequestsResponse> getListRequestsMethod;
    if ((getListRequestsMethod = ServerServiceGrpc.getListRequestsMethod) == null) {
      synchronized (ServerServiceGrpc.class) {
        if ((getListRequestsMethod = ServerServiceGrpc.getListRequestsMethod) == null) {
          ServerServiceGrpc.getListRequestsMethod = getListRequestsMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.ListRequestsRequest, dev.icehouse.v1.ListRequestsResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "ListRequests"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.ListRequestsRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.ListRequestsResponse.getDefaultInstance()))
              .setSchemaDescriptor(new ServerServiceMethodDescriptorSupplier("ListRequests"))
              .build();
        }
      }
    }
    return getListRequestsMethod;
  }

  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.CancelRequestRequest,
      dev.icehouse.v1.CancelRequestResponse> getCancelRequestMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "CancelRequest",
      requestType = dev.icehouse.v1.CancelRequestRequest.class,
      responseType = dev.icehouse.v1.CancelRequestResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.CancelRequestRequest,
      dev.icehouse.v1.CancelRequestResponse> getCancelRequestMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.CancelRequestRequest, dev.icehouse.v1.CancelRequestResponse> getCancelRequestMethod;
    if ((getCancelRequestMethod = ServerServiceGrpc.getCancelRequestMethod) == null) {
      synchronized (ServerServiceGrpc.class) {
        if ((getCancelRequestMethod = ServerServiceGrpc.getCancelRequestMethod) == null) {
          ServerServiceGrpc.getCancelRequestMethod = getCancelRequestMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.CancelRequestRequest, dev.icehouse.v1.CancelRequestResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "CancelRequest"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.CancelRequestRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.CancelRequestResponse.getDefaultInstance()))
              .setSchemaDescriptor(new ServerServiceMethodDescriptorSupplier("CancelRequest"))
              .build();
        }
      }
    }
    return getCancelRequestMethod;
  }

  /**
   * Creates a new async stub that supports all call types for the service
   */
  public static ServerServiceStub newStub(io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<ServerServiceStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<ServerServiceStub>() {
        @java.lang.Override
        public ServerServiceStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new ServerServiceStub(channel, callOptions);
        }
      };
    return ServerServiceStub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports all types of calls on the service
   */
  public static ServerServiceBlockingV2Stub newBlockingV2Stub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<ServerServiceBlockingV2Stub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<ServerServiceBlockingV2Stub>() {
        @java.lang.Override
        public ServerServiceBlockingV2Stub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new ServerServiceBlockingV2Stub(channel, callOptions);
        }
      };
    return ServerServiceBlockingV2Stub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports unary and streaming output calls on the service
   */
  public static ServerServiceBlockingStub newBlockingStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<ServerServiceBlockingStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<ServerServiceBlockingStub>() {
        @java.lang.Override
        public ServerServiceBlockingStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new ServerServiceBlockingStub(channel, callOptions);
        }
      };
    return ServerServiceBlockingStub.newStub(factory, channel);
  }

  /**
   * Creates a new ListenableFuture-style stub that supports unary calls on the service
   */
  public static ServerServiceFutureStub newFutureStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<ServerServiceFutureStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<ServerServiceFutureStub>() {
        @java.lang.Override
        public ServerServiceFutureStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new ServerServiceFutureStub(channel, callOptions);
        }
      };
    return ServerServiceFutureStub.newStub(factory, channel);
  }

  /**
   * <pre>
   * Describes a server and what it is doing, and cancels requests. Errors carry google.rpc details as
   * InferenceService's do. Authenticated callers see and cancel only their own tenant's requests, operators those
   * of all tenants. A server knows only its own requests: behind a load balancer, ask each replica.
   * </pre>
   */
  public interface AsyncService {

    /**
     * <pre>
     * Returns version, features and limits. Answers while the model loads, too.
     * </pre>
     */
    default void getServer(dev.icehouse.v1.GetServerRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.GetServerResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getGetServerMethod(), responseObserver);
    }

    /**
     * <pre>
     * Returns the counters of the engine, of the prefix cache and of tenants, taken between two steps.
     * </pre>
     */
    default void getStats(dev.icehouse.v1.GetStatsRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.GetStatsResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getGetStatsMethod(), responseObserver);
    }

    /**
     * <pre>
     * Sends the counters of GetStats at once and then at an interval, until the caller cancels.
     * </pre>
     */
    default void watchStats(dev.icehouse.v1.WatchStatsRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.WatchStatsResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getWatchStatsMethod(), responseObserver);
    }

    /**
     * <pre>
     * Lists the requests that wait for the engine or run in it, the oldest first: those of Generate, Stream, Warm,
     * Embed, Rerank and of gateways, and those of them that wait for their model to be loaded. A request whose prompt
     * is still being tokenized is not listed.
     * INVALID_ARGUMENT for a negative page size or a bad token.
     * </pre>
     */
    default void listRequests(dev.icehouse.v1.ListRequestsRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.ListRequestsResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getListRequestsMethod(), responseObserver);
    }

    /**
     * <pre>
     * Ends a request within a step; its caller gets CANCELLED. NOT_FOUND (REQUEST_NOT_FOUND) when there is no
     * request with this id that the caller may cancel: it may have ended by itself.
     * </pre>
     */
    default void cancelRequest(dev.icehouse.v1.CancelRequestRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.CancelRequestResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getCancelRequestMethod(), responseObserver);
    }
  }

  /**
   * Base class for the server implementation of the service ServerService.
   * <pre>
   * Describes a server and what it is doing, and cancels requests. Errors carry google.rpc details as
   * InferenceService's do. Authenticated callers see and cancel only their own tenant's requests, operators those
   * of all tenants. A server knows only its own requests: behind a load balancer, ask each replica.
   * </pre>
   */
  public static abstract class ServerServiceImplBase
      implements io.grpc.BindableService, AsyncService {

    @java.lang.Override public final io.grpc.ServerServiceDefinition bindService() {
      return ServerServiceGrpc.bindService(this);
    }
  }

  /**
   * A stub to allow clients to do asynchronous rpc calls to service ServerService.
   * <pre>
   * Describes a server and what it is doing, and cancels requests. Errors carry google.rpc details as
   * InferenceService's do. Authenticated callers see and cancel only their own tenant's requests, operators those
   * of all tenants. A server knows only its own requests: behind a load balancer, ask each replica.
   * </pre>
   */
  public static final class ServerServiceStub
      extends io.grpc.stub.AbstractAsyncStub<ServerServiceStub> {
    private ServerServiceStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected ServerServiceStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new ServerServiceStub(channel, callOptions);
    }

    /**
     * <pre>
     * Returns version, features and limits. Answers while the model loads, too.
     * </pre>
     */
    public void getServer(dev.icehouse.v1.GetServerRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.GetServerResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getGetServerMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Returns the counters of the engine, of the prefix cache and of tenants, taken between two steps.
     * </pre>
     */
    public void getStats(dev.icehouse.v1.GetStatsRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.GetStatsResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getGetStatsMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Sends the counters of GetStats at once and then at an interval, until the caller cancels.
     * </pre>
     */
    public void watchStats(dev.icehouse.v1.WatchStatsRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.WatchStatsResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncServerStreamingCall(
          getChannel().newCall(getWatchStatsMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Lists the requests that wait for the engine or run in it, the oldest first: those of Generate, Stream, Warm,
     * Embed, Rerank and of gateways, and those of them that wait for their model to be loaded. A request whose prompt
     * is still being tokenized is not listed.
     * INVALID_ARGUMENT for a negative page size or a bad token.
     * </pre>
     */
    public void listRequests(dev.icehouse.v1.ListRequestsRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.ListRequestsResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getListRequestsMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Ends a request within a step; its caller gets CANCELLED. NOT_FOUND (REQUEST_NOT_FOUND) when there is no
     * request with this id that the caller may cancel: it may have ended by itself.
     * </pre>
     */
    public void cancelRequest(dev.icehouse.v1.CancelRequestRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.CancelRequestResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getCancelRequestMethod(), getCallOptions()), request, responseObserver);
    }
  }

  /**
   * A stub to allow clients to do synchronous rpc calls to service ServerService.
   * <pre>
   * Describes a server and what it is doing, and cancels requests. Errors carry google.rpc details as
   * InferenceService's do. Authenticated callers see and cancel only their own tenant's requests, operators those
   * of all tenants. A server knows only its own requests: behind a load balancer, ask each replica.
   * </pre>
   */
  public static final class ServerServiceBlockingV2Stub
      extends io.grpc.stub.AbstractBlockingStub<ServerServiceBlockingV2Stub> {
    private ServerServiceBlockingV2Stub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected ServerServiceBlockingV2Stub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new ServerServiceBlockingV2Stub(channel, callOptions);
    }

    /**
     * <pre>
     * Returns version, features and limits. Answers while the model loads, too.
     * </pre>
     */
    public dev.icehouse.v1.GetServerResponse getServer(dev.icehouse.v1.GetServerRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getGetServerMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Returns the counters of the engine, of the prefix cache and of tenants, taken between two steps.
     * </pre>
     */
    public dev.icehouse.v1.GetStatsResponse getStats(dev.icehouse.v1.GetStatsRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getGetStatsMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Sends the counters of GetStats at once and then at an interval, until the caller cancels.
     * </pre>
     */
    @io.grpc.ExperimentalApi("https://github.com/grpc/grpc-java/issues/10918")
    public io.grpc.stub.BlockingClientCall<?, dev.icehouse.v1.WatchStatsResponse>
        watchStats(dev.icehouse.v1.WatchStatsRequest request) {
      return io.grpc.stub.ClientCalls.blockingV2ServerStreamingCall(
          getChannel(), getWatchStatsMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Lists the requests that wait for the engine or run in it, the oldest first: those of Generate, Stream, Warm,
     * Embed, Rerank and of gateways, and those of them that wait for their model to be loaded. A request whose prompt
     * is still being tokenized is not listed.
     * INVALID_ARGUMENT for a negative page size or a bad token.
     * </pre>
     */
    public dev.icehouse.v1.ListRequestsResponse listRequests(dev.icehouse.v1.ListRequestsRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getListRequestsMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Ends a request within a step; its caller gets CANCELLED. NOT_FOUND (REQUEST_NOT_FOUND) when there is no
     * request with this id that the caller may cancel: it may have ended by itself.
     * </pre>
     */
    public dev.icehouse.v1.CancelRequestResponse cancelRequest(dev.icehouse.v1.CancelRequestRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getCancelRequestMethod(), getCallOptions(), request);
    }
  }

  /**
   * A stub to allow clients to do limited synchronous rpc calls to service ServerService.
   * <pre>
   * Describes a server and what it is doing, and cancels requests. Errors carry google.rpc details as
   * InferenceService's do. Authenticated callers see and cancel only their own tenant's requests, operators those
   * of all tenants. A server knows only its own requests: behind a load balancer, ask each replica.
   * </pre>
   */
  public static final class ServerServiceBlockingStub
      extends io.grpc.stub.AbstractBlockingStub<ServerServiceBlockingStub> {
    private ServerServiceBlockingStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected ServerServiceBlockingStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new ServerServiceBlockingStub(channel, callOptions);
    }

    /**
     * <pre>
     * Returns version, features and limits. Answers while the model loads, too.
     * </pre>
     */
    public dev.icehouse.v1.GetServerResponse getServer(dev.icehouse.v1.GetServerRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getGetServerMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Returns the counters of the engine, of the prefix cache and of tenants, taken between two steps.
     * </pre>
     */
    public dev.icehouse.v1.GetStatsResponse getStats(dev.icehouse.v1.GetStatsRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getGetStatsMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Sends the counters of GetStats at once and then at an interval, until the caller cancels.
     * </pre>
     */
    public java.util.Iterator<dev.icehouse.v1.WatchStatsResponse> watchStats(
        dev.icehouse.v1.WatchStatsRequest request) {
      return io.grpc.stub.ClientCalls.blockingServerStreamingCall(
          getChannel(), getWatchStatsMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Lists the requests that wait for the engine or run in it, the oldest first: those of Generate, Stream, Warm,
     * Embed, Rerank and of gateways, and those of them that wait for their model to be loaded. A request whose prompt
     * is still being tokenized is not listed.
     * INVALID_ARGUMENT for a negative page size or a bad token.
     * </pre>
     */
    public dev.icehouse.v1.ListRequestsResponse listRequests(dev.icehouse.v1.ListRequestsRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getListRequestsMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Ends a request within a step; its caller gets CANCELLED. NOT_FOUND (REQUEST_NOT_FOUND) when there is no
     * request with this id that the caller may cancel: it may have ended by itself.
     * </pre>
     */
    public dev.icehouse.v1.CancelRequestResponse cancelRequest(dev.icehouse.v1.CancelRequestRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getCancelRequestMethod(), getCallOptions(), request);
    }
  }

  /**
   * A stub to allow clients to do ListenableFuture-style rpc calls to service ServerService.
   * <pre>
   * Describes a server and what it is doing, and cancels requests. Errors carry google.rpc details as
   * InferenceService's do. Authenticated callers see and cancel only their own tenant's requests, operators those
   * of all tenants. A server knows only its own requests: behind a load balancer, ask each replica.
   * </pre>
   */
  public static final class ServerServiceFutureStub
      extends io.grpc.stub.AbstractFutureStub<ServerServiceFutureStub> {
    private ServerServiceFutureStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected ServerServiceFutureStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new ServerServiceFutureStub(channel, callOptions);
    }

    /**
     * <pre>
     * Returns version, features and limits. Answers while the model loads, too.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<dev.icehouse.v1.GetServerResponse> getServer(
        dev.icehouse.v1.GetServerRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getGetServerMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * Returns the counters of the engine, of the prefix cache and of tenants, taken between two steps.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<dev.icehouse.v1.GetStatsResponse> getStats(
        dev.icehouse.v1.GetStatsRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getGetStatsMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * Lists the requests that wait for the engine or run in it, the oldest first: those of Generate, Stream, Warm,
     * Embed, Rerank and of gateways, and those of them that wait for their model to be loaded. A request whose prompt
     * is still being tokenized is not listed.
     * INVALID_ARGUMENT for a negative page size or a bad token.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<dev.icehouse.v1.ListRequestsResponse> listRequests(
        dev.icehouse.v1.ListRequestsRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getListRequestsMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * Ends a request within a step; its caller gets CANCELLED. NOT_FOUND (REQUEST_NOT_FOUND) when there is no
     * request with this id that the caller may cancel: it may have ended by itself.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<dev.icehouse.v1.CancelRequestResponse> cancelRequest(
        dev.icehouse.v1.CancelRequestRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getCancelRequestMethod(), getCallOptions()), request);
    }
  }

  private static final int METHODID_GET_SERVER = 0;
  private static final int METHODID_GET_STATS = 1;
  private static final int METHODID_WATCH_STATS = 2;
  private static final int METHODID_LIST_REQUESTS = 3;
  private static final int METHODID_CANCEL_REQUEST = 4;

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
        case METHODID_GET_SERVER:
          serviceImpl.getServer((dev.icehouse.v1.GetServerRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.GetServerResponse>) responseObserver);
          break;
        case METHODID_GET_STATS:
          serviceImpl.getStats((dev.icehouse.v1.GetStatsRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.GetStatsResponse>) responseObserver);
          break;
        case METHODID_WATCH_STATS:
          serviceImpl.watchStats((dev.icehouse.v1.WatchStatsRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.WatchStatsResponse>) responseObserver);
          break;
        case METHODID_LIST_REQUESTS:
          serviceImpl.listRequests((dev.icehouse.v1.ListRequestsRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.ListRequestsResponse>) responseObserver);
          break;
        case METHODID_CANCEL_REQUEST:
          serviceImpl.cancelRequest((dev.icehouse.v1.CancelRequestRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.CancelRequestResponse>) responseObserver);
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
          getGetServerMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              dev.icehouse.v1.GetServerRequest,
              dev.icehouse.v1.GetServerResponse>(
                service, METHODID_GET_SERVER)))
        .addMethod(
          getGetStatsMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              dev.icehouse.v1.GetStatsRequest,
              dev.icehouse.v1.GetStatsResponse>(
                service, METHODID_GET_STATS)))
        .addMethod(
          getWatchStatsMethod(),
          io.grpc.stub.ServerCalls.asyncServerStreamingCall(
            new MethodHandlers<
              dev.icehouse.v1.WatchStatsRequest,
              dev.icehouse.v1.WatchStatsResponse>(
                service, METHODID_WATCH_STATS)))
        .addMethod(
          getListRequestsMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              dev.icehouse.v1.ListRequestsRequest,
              dev.icehouse.v1.ListRequestsResponse>(
                service, METHODID_LIST_REQUESTS)))
        .addMethod(
          getCancelRequestMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              dev.icehouse.v1.CancelRequestRequest,
              dev.icehouse.v1.CancelRequestResponse>(
                service, METHODID_CANCEL_REQUEST)))
        .build();
  }

  private static abstract class ServerServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoFileDescriptorSupplier, io.grpc.protobuf.ProtoServiceDescriptorSupplier {
    ServerServiceBaseDescriptorSupplier() {}

    @java.lang.Override
    public com.google.protobuf.Descriptors.FileDescriptor getFileDescriptor() {
      return dev.icehouse.v1.ServerServiceOuterClass.getDescriptor();
    }

    @java.lang.Override
    public com.google.protobuf.Descriptors.ServiceDescriptor getServiceDescriptor() {
      return getFileDescriptor().findServiceByName("ServerService");
    }
  }

  private static final class ServerServiceFileDescriptorSupplier
      extends ServerServiceBaseDescriptorSupplier {
    ServerServiceFileDescriptorSupplier() {}
  }

  private static final class ServerServiceMethodDescriptorSupplier
      extends ServerServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoMethodDescriptorSupplier {
    private final java.lang.String methodName;

    ServerServiceMethodDescriptorSupplier(java.lang.String methodName) {
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
      synchronized (ServerServiceGrpc.class) {
        result = serviceDescriptor;
        if (result == null) {
          serviceDescriptor = result = io.grpc.ServiceDescriptor.newBuilder(SERVICE_NAME)
              .setSchemaDescriptor(new ServerServiceFileDescriptorSupplier())
              .addMethod(getGetServerMethod())
              .addMethod(getGetStatsMethod())
              .addMethod(getWatchStatsMethod())
              .addMethod(getListRequestsMethod())
              .addMethod(getCancelRequestMethod())
              .build();
        }
      }
    }
    return result;
  }
}
