package dev.icehouse.v1;

import static io.grpc.MethodDescriptor.generateFullMethodName;

/**
 * <pre>
 * Inspects and manages the prefix cache. Errors carry google.rpc details as InferenceService's do;
 * FAILED_PRECONDITION (CACHE_UNSUPPORTED) where the server has no cache, or not the tier that the command needs.
 * Authenticated callers manage only their own tenant's blocks; otherwise PERMISSION_DENIED (TENANT_FORBIDDEN,
 * OPERATOR_ONLY).
 * Warm, Evict, EvictAll and Verify may take minutes. Each is a stream: any number of `progress`, and `done` with
 * the result once, last.
 * </pre>
 */
@io.grpc.stub.annotations.GrpcGenerated
public final class CacheServiceGrpc {

  private CacheServiceGrpc() {}

  public static final java.lang.String SERVICE_NAME = "icehouse.v1.CacheService";

  // Static method descriptors that strictly reflect the proto.
  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.ExplainRequest,
      dev.icehouse.v1.ExplainResponse> getExplainMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Explain",
      requestType = dev.icehouse.v1.ExplainRequest.class,
      responseType = dev.icehouse.v1.ExplainResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.ExplainRequest,
      dev.icehouse.v1.ExplainResponse> getExplainMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.ExplainRequest, dev.icehouse.v1.ExplainResponse> getExplainMethod;
    if ((getExplainMethod = CacheServiceGrpc.getExplainMethod) == null) {
      synchronized (CacheServiceGrpc.class) {
        if ((getExplainMethod = CacheServiceGrpc.getExplainMethod) == null) {
          CacheServiceGrpc.getExplainMethod = getExplainMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.ExplainRequest, dev.icehouse.v1.ExplainResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Explain"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.ExplainRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.ExplainResponse.getDefaultInstance()))
              .setSchemaDescriptor(new CacheServiceMethodDescriptorSupplier("Explain"))
              .build();
        }
      }
    }
    return getExplainMethod;
  }

  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.WarmRequest,
      dev.icehouse.v1.WarmResponse> getWarmMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Warm",
      requestType = dev.icehouse.v1.WarmRequest.class,
      responseType = dev.icehouse.v1.WarmResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.WarmRequest,
      dev.icehouse.v1.WarmResponse> getWarmMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.WarmRequest, dev.icehouse.v1.WarmResponse> getWarmMethod;
    if ((getWarmMethod = CacheServiceGrpc.getWarmMethod) == null) {
      synchronized (CacheServiceGrpc.class) {
        if ((getWarmMethod = CacheServiceGrpc.getWarmMethod) == null) {
          CacheServiceGrpc.getWarmMethod = getWarmMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.WarmRequest, dev.icehouse.v1.WarmResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Warm"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.WarmRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.WarmResponse.getDefaultInstance()))
              .setSchemaDescriptor(new CacheServiceMethodDescriptorSupplier("Warm"))
              .build();
        }
      }
    }
    return getWarmMethod;
  }

  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.PinRequest,
      dev.icehouse.v1.PinResponse> getPinMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Pin",
      requestType = dev.icehouse.v1.PinRequest.class,
      responseType = dev.icehouse.v1.PinResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.PinRequest,
      dev.icehouse.v1.PinResponse> getPinMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.PinRequest, dev.icehouse.v1.PinResponse> getPinMethod;
    if ((getPinMethod = CacheServiceGrpc.getPinMethod) == null) {
      synchronized (CacheServiceGrpc.class) {
        if ((getPinMethod = CacheServiceGrpc.getPinMethod) == null) {
          CacheServiceGrpc.getPinMethod = getPinMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.PinRequest, dev.icehouse.v1.PinResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Pin"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.PinRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.PinResponse.getDefaultInstance()))
              .setSchemaDescriptor(new CacheServiceMethodDescriptorSupplier("Pin"))
              .build();
        }
      }
    }
    return getPinMethod;
  }

  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.UnpinRequest,
      dev.icehouse.v1.UnpinResponse> getUnpinMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Unpin",
      requestType = dev.icehouse.v1.UnpinRequest.class,
      responseType = dev.icehouse.v1.UnpinResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.UnpinRequest,
      dev.icehouse.v1.UnpinResponse> getUnpinMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.UnpinRequest, dev.icehouse.v1.UnpinResponse> getUnpinMethod;
    if ((getUnpinMethod = CacheServiceGrpc.getUnpinMethod) == null) {
      synchronized (CacheServiceGrpc.class) {
        if ((getUnpinMethod = CacheServiceGrpc.getUnpinMethod) == null) {
          CacheServiceGrpc.getUnpinMethod = getUnpinMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.UnpinRequest, dev.icehouse.v1.UnpinResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Unpin"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.UnpinRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.UnpinResponse.getDefaultInstance()))
              .setSchemaDescriptor(new CacheServiceMethodDescriptorSupplier("Unpin"))
              .build();
        }
      }
    }
    return getUnpinMethod;
  }

  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.EndSessionRequest,
      dev.icehouse.v1.EndSessionResponse> getEndSessionMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "EndSession",
      requestType = dev.icehouse.v1.EndSessionRequest.class,
      responseType = dev.icehouse.v1.EndSessionResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.EndSessionRequest,
      dev.icehouse.v1.EndSessionResponse> getEndSessionMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.EndSessionRequest, dev.icehouse.v1.EndSessionResponse> getEndSessionMethod;
    if ((getEndSessionMethod = CacheServiceGrpc.getEndSessionMethod) == null) {
      synchronized (CacheServiceGrpc.class) {
        if ((getEndSessionMethod = CacheServiceGrpc.getEndSessionMethod) == null) {
          CacheServiceGrpc.getEndSessionMethod = getEndSessionMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.EndSessionRequest, dev.icehouse.v1.EndSessionResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "EndSession"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.EndSessionRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.EndSessionResponse.getDefaultInstance()))
              .setSchemaDescriptor(new CacheServiceMethodDescriptorSupplier("EndSession"))
              .build();
        }
      }
    }
    return getEndSessionMethod;
  }

  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.EvictRequest,
      dev.icehouse.v1.EvictResponse> getEvictMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Evict",
      requestType = dev.icehouse.v1.EvictRequest.class,
      responseType = dev.icehouse.v1.EvictResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.EvictRequest,
      dev.icehouse.v1.EvictResponse> getEvictMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.EvictRequest, dev.icehouse.v1.EvictResponse> getEvictMethod;
    if ((getEvictMethod = CacheServiceGrpc.getEvictMethod) == null) {
      synchronized (CacheServiceGrpc.class) {
        if ((getEvictMethod = CacheServiceGrpc.getEvictMethod) == null) {
          CacheServiceGrpc.getEvictMethod = getEvictMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.EvictRequest, dev.icehouse.v1.EvictResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Evict"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.EvictRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.EvictResponse.getDefaultInstance()))
              .setSchemaDescriptor(new CacheServiceMethodDescriptorSupplier("Evict"))
              .build();
        }
      }
    }
    return getEvictMethod;
  }

  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.EvictAllRequest,
      dev.icehouse.v1.EvictAllResponse> getEvictAllMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "EvictAll",
      requestType = dev.icehouse.v1.EvictAllRequest.class,
      responseType = dev.icehouse.v1.EvictAllResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.EvictAllRequest,
      dev.icehouse.v1.EvictAllResponse> getEvictAllMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.EvictAllRequest, dev.icehouse.v1.EvictAllResponse> getEvictAllMethod;
    if ((getEvictAllMethod = CacheServiceGrpc.getEvictAllMethod) == null) {
      synchronized (CacheServiceGrpc.class) {
        if ((getEvictAllMethod = CacheServiceGrpc.getEvictAllMethod) == null) {
          CacheServiceGrpc.getEvictAllMethod = getEvictAllMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.EvictAllRequest, dev.icehouse.v1.EvictAllResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "EvictAll"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.EvictAllRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.EvictAllResponse.getDefaultInstance()))
              .setSchemaDescriptor(new CacheServiceMethodDescriptorSupplier("EvictAll"))
              .build();
        }
      }
    }
    return getEvictAllMethod;
  }

  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.VerifyRequest,
      dev.icehouse.v1.VerifyResponse> getVerifyMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Verify",
      requestType = dev.icehouse.v1.VerifyRequest.class,
      responseType = dev.icehouse.v1.VerifyResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.VerifyRequest,
      dev.icehouse.v1.VerifyResponse> getVerifyMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.VerifyRequest, dev.icehouse.v1.VerifyResponse> getVerifyMethod;
    if ((getVerifyMethod = CacheServiceGrpc.getVerifyMethod) == null) {
      synchronized (CacheServiceGrpc.class) {
        if ((getVerifyMethod = CacheServiceGrpc.getVerifyMethod) == null) {
          CacheServiceGrpc.getVerifyMethod = getVerifyMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.VerifyRequest, dev.icehouse.v1.VerifyResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Verify"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.VerifyRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.VerifyResponse.getDefaultInstance()))
              .setSchemaDescriptor(new CacheServiceMethodDescriptorSupplier("Verify"))
              .build();
        }
      }
    }
    return getVerifyMethod;
  }

  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.ExportRequest,
      dev.icehouse.v1.ExportResponse> getExportMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Export",
      requestType = dev.icehouse.v1.ExportRequest.class,
      responseType = dev.icehouse.v1.ExportResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.ExportRequest,
      dev.icehouse.v1.ExportResponse> getExportMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.ExportRequest, dev.icehouse.v1.ExportResponse> getExportMethod;
    if ((getExportMethod = CacheServiceGrpc.getExportMethod) == null) {
      synchronized (CacheServiceGrpc.class) {
        if ((getExportMethod = CacheServiceGrpc.getExportMethod) == null) {
          CacheServiceGrpc.getExportMethod = getExportMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.ExportRequest, dev.icehouse.v1.ExportResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Export"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.ExportRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.ExportResponse.getDefaultInstance()))
              .setSchemaDescriptor(new CacheServiceMethodDescriptorSupplier("Export"))
              .build();
        }
      }
    }
    return getExportMethod;
  }

  private static volatile io.grpc.MethodDescriptor<dev.icehouse.v1.ImportRequest,
      dev.icehouse.v1.ImportResponse> getImportMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Import",
      requestType = dev.icehouse.v1.ImportRequest.class,
      responseType = dev.icehouse.v1.ImportResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.CLIENT_STREAMING)
  public static io.grpc.MethodDescriptor<dev.icehouse.v1.ImportRequest,
      dev.icehouse.v1.ImportResponse> getImportMethod() {
    io.grpc.MethodDescriptor<dev.icehouse.v1.ImportRequest, dev.icehouse.v1.ImportResponse> getImportMethod;
    if ((getImportMethod = CacheServiceGrpc.getImportMethod) == null) {
      synchronized (CacheServiceGrpc.class) {
        if ((getImportMethod = CacheServiceGrpc.getImportMethod) == null) {
          CacheServiceGrpc.getImportMethod = getImportMethod =
              io.grpc.MethodDescriptor.<dev.icehouse.v1.ImportRequest, dev.icehouse.v1.ImportResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.CLIENT_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Import"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.ImportRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  dev.icehouse.v1.ImportResponse.getDefaultInstance()))
              .setSchemaDescriptor(new CacheServiceMethodDescriptorSupplier("Import"))
              .build();
        }
      }
    }
    return getImportMethod;
  }

  /**
   * Creates a new async stub that supports all call types for the service
   */
  public static CacheServiceStub newStub(io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<CacheServiceStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<CacheServiceStub>() {
        @java.lang.Override
        public CacheServiceStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new CacheServiceStub(channel, callOptions);
        }
      };
    return CacheServiceStub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports all types of calls on the service
   */
  public static CacheServiceBlockingV2Stub newBlockingV2Stub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<CacheServiceBlockingV2Stub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<CacheServiceBlockingV2Stub>() {
        @java.lang.Override
        public CacheServiceBlockingV2Stub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new CacheServiceBlockingV2Stub(channel, callOptions);
        }
      };
    return CacheServiceBlockingV2Stub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports unary and streaming output calls on the service
   */
  public static CacheServiceBlockingStub newBlockingStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<CacheServiceBlockingStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<CacheServiceBlockingStub>() {
        @java.lang.Override
        public CacheServiceBlockingStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new CacheServiceBlockingStub(channel, callOptions);
        }
      };
    return CacheServiceBlockingStub.newStub(factory, channel);
  }

  /**
   * Creates a new ListenableFuture-style stub that supports unary calls on the service
   */
  public static CacheServiceFutureStub newFutureStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<CacheServiceFutureStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<CacheServiceFutureStub>() {
        @java.lang.Override
        public CacheServiceFutureStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new CacheServiceFutureStub(channel, callOptions);
        }
      };
    return CacheServiceFutureStub.newStub(factory, channel);
  }

  /**
   * <pre>
   * Inspects and manages the prefix cache. Errors carry google.rpc details as InferenceService's do;
   * FAILED_PRECONDITION (CACHE_UNSUPPORTED) where the server has no cache, or not the tier that the command needs.
   * Authenticated callers manage only their own tenant's blocks; otherwise PERMISSION_DENIED (TENANT_FORBIDDEN,
   * OPERATOR_ONLY).
   * Warm, Evict, EvictAll and Verify may take minutes. Each is a stream: any number of `progress`, and `done` with
   * the result once, last.
   * </pre>
   */
  public interface AsyncService {

    /**
     * <pre>
     * Returns what Generate would reuse of a prompt, without running it.
     * </pre>
     */
    default void explain(dev.icehouse.v1.ExplainRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.ExplainResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getExplainMethod(), responseObserver);
    }

    /**
     * <pre>
     * Brings a prompt into the RAM tier, without generating: blocks that are only on SSD are read, and what is missing
     * is computed. Less recently used blocks leave RAM for it, but none that running requests use. When the caller
     * cancels or its deadline passes, it stops, and what was computed by then is kept.
     * </pre>
     */
    default void warm(dev.icehouse.v1.WarmRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.WarmResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getWarmMethod(), responseObserver);
    }

    /**
     * <pre>
     * Protects the cached blocks of a prompt from eviction by policy, until Unpin or for a time. NOT_FOUND
     * (BLOCK_NOT_FOUND) when none of them is cached.
     * </pre>
     */
    default void pin(dev.icehouse.v1.PinRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.PinResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getPinMethod(), responseObserver);
    }

    /**
     * <pre>
     * Removes the protection of Pin. Blocks that are not pinned are left as they are.
     * </pre>
     */
    default void unpin(dev.icehouse.v1.UnpinRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.UnpinResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getUnpinMethod(), responseObserver);
    }

    /**
     * <pre>
     * Says that a session, the conversation that `session_id` of a request names, has ended. Blocks that only its
     * requests and those of sessions that it started have used are evicted before all others from now on, and stay
     * until then. If the session goes on nevertheless, it reuses what is left, which is then as recently used as any
     * other. Nothing happens for a session that the server does not know; it remembers the last 4096.
     * </pre>
     */
    default void endSession(dev.icehouse.v1.EndSessionRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.EndSessionResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getEndSessionMethod(), responseObserver);
    }

    /**
     * <pre>
     * Removes the blocks of a prompt from both tiers, including pinned ones: those that are cached when it begins,
     * 256 at a time, the ends of prompts before their beginnings. Requests run in between; running ones keep their
     * copies. When the caller cancels or its deadline passes, it ends within 256 blocks: what was removed by then
     * is gone, the rest stays cached. What is cached meanwhile stays, too.
     * </pre>
     */
    default void evict(dev.icehouse.v1.EvictRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.EvictResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getEvictMethod(), responseObserver);
    }

    /**
     * <pre>
     * Removes all blocks of a model, of every tenant, as Evict does, and forgets the earlier replies that stable
     * prompts (PROMPT_FORM_STABLE) begin with. Only for operators.
     * </pre>
     */
    default void evictAll(dev.icehouse.v1.EvictAllRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.EvictAllResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getEvictAllMethod(), responseObserver);
    }

    /**
     * <pre>
     * Reads blocks on SSD, of one loaded model and of all that are not loaded, and compares their checksums.
     * Damaged ones go into quarantine. Loads no model. Only for operators. Reads at the full speed of the disk, so a large cache takes many minutes: with
     * `block_limit` it is checked a part at a time. When the caller cancels or
     * its deadline passes, it ends within 64 blocks, and the next check continues from there.
     * </pre>
     */
    default void verify(dev.icehouse.v1.VerifyRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.VerifyResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getVerifyMethod(), responseObserver);
    }

    /**
     * <pre>
     * Sends the cached blocks of a prompt, or of a tenant, as an archive: one stream of bytes, in the clear, with
     * the prompts' tokens in it. Blocks that RAM alone has are written to SSD first. NOT_FOUND (BLOCK_NOT_FOUND)
     * when nothing is cached. When the caller cancels, or reads nothing for a while, it ends and leaves nothing.
     * </pre>
     */
    default void export(dev.icehouse.v1.ExportRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.ExportResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getExportMethod(), responseObserver);
    }

    /**
     * <pre>
     * Adopts the blocks of an archive as the caller's tenant's, each once it is verified, and up to the first byte
     * that is not as it was written. Nothing is removed for them: what passes the quota or the SSD limit is refused
     * and counted. NOT_FOUND (MODEL_NOT_FOUND) for the archive of another model; DEADLINE_EXCEEDED (MESSAGE_LATE)
     * when nothing comes for a while. Whoever may import decides what the tenant's requests reuse: give that to
     * those only who may speak for the tenant.
     * </pre>
     */
    default io.grpc.stub.StreamObserver<dev.icehouse.v1.ImportRequest> import_(
        io.grpc.stub.StreamObserver<dev.icehouse.v1.ImportResponse> responseObserver) {
      return io.grpc.stub.ServerCalls.asyncUnimplementedStreamingCall(getImportMethod(), responseObserver);
    }
  }

  /**
   * Base class for the server implementation of the service CacheService.
   * <pre>
   * Inspects and manages the prefix cache. Errors carry google.rpc details as InferenceService's do;
   * FAILED_PRECONDITION (CACHE_UNSUPPORTED) where the server has no cache, or not the tier that the command needs.
   * Authenticated callers manage only their own tenant's blocks; otherwise PERMISSION_DENIED (TENANT_FORBIDDEN,
   * OPERATOR_ONLY).
   * Warm, Evict, EvictAll and Verify may take minutes. Each is a stream: any number of `progress`, and `done` with
   * the result once, last.
   * </pre>
   */
  public static abstract class CacheServiceImplBase
      implements io.grpc.BindableService, AsyncService {

    @java.lang.Override public final io.grpc.ServerServiceDefinition bindService() {
      return CacheServiceGrpc.bindService(this);
    }
  }

  /**
   * A stub to allow clients to do asynchronous rpc calls to service CacheService.
   * <pre>
   * Inspects and manages the prefix cache. Errors carry google.rpc details as InferenceService's do;
   * FAILED_PRECONDITION (CACHE_UNSUPPORTED) where the server has no cache, or not the tier that the command needs.
   * Authenticated callers manage only their own tenant's blocks; otherwise PERMISSION_DENIED (TENANT_FORBIDDEN,
   * OPERATOR_ONLY).
   * Warm, Evict, EvictAll and Verify may take minutes. Each is a stream: any number of `progress`, and `done` with
   * the result once, last.
   * </pre>
   */
  public static final class CacheServiceStub
      extends io.grpc.stub.AbstractAsyncStub<CacheServiceStub> {
    private CacheServiceStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected CacheServiceStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new CacheServiceStub(channel, callOptions);
    }

    /**
     * <pre>
     * Returns what Generate would reuse of a prompt, without running it.
     * </pre>
     */
    public void explain(dev.icehouse.v1.ExplainRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.ExplainResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getExplainMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Brings a prompt into the RAM tier, without generating: blocks that are only on SSD are read, and what is missing
     * is computed. Less recently used blocks leave RAM for it, but none that running requests use. When the caller
     * cancels or its deadline passes, it stops, and what was computed by then is kept.
     * </pre>
     */
    public void warm(dev.icehouse.v1.WarmRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.WarmResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncServerStreamingCall(
          getChannel().newCall(getWarmMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Protects the cached blocks of a prompt from eviction by policy, until Unpin or for a time. NOT_FOUND
     * (BLOCK_NOT_FOUND) when none of them is cached.
     * </pre>
     */
    public void pin(dev.icehouse.v1.PinRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.PinResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getPinMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Removes the protection of Pin. Blocks that are not pinned are left as they are.
     * </pre>
     */
    public void unpin(dev.icehouse.v1.UnpinRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.UnpinResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getUnpinMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Says that a session, the conversation that `session_id` of a request names, has ended. Blocks that only its
     * requests and those of sessions that it started have used are evicted before all others from now on, and stay
     * until then. If the session goes on nevertheless, it reuses what is left, which is then as recently used as any
     * other. Nothing happens for a session that the server does not know; it remembers the last 4096.
     * </pre>
     */
    public void endSession(dev.icehouse.v1.EndSessionRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.EndSessionResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getEndSessionMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Removes the blocks of a prompt from both tiers, including pinned ones: those that are cached when it begins,
     * 256 at a time, the ends of prompts before their beginnings. Requests run in between; running ones keep their
     * copies. When the caller cancels or its deadline passes, it ends within 256 blocks: what was removed by then
     * is gone, the rest stays cached. What is cached meanwhile stays, too.
     * </pre>
     */
    public void evict(dev.icehouse.v1.EvictRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.EvictResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncServerStreamingCall(
          getChannel().newCall(getEvictMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Removes all blocks of a model, of every tenant, as Evict does, and forgets the earlier replies that stable
     * prompts (PROMPT_FORM_STABLE) begin with. Only for operators.
     * </pre>
     */
    public void evictAll(dev.icehouse.v1.EvictAllRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.EvictAllResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncServerStreamingCall(
          getChannel().newCall(getEvictAllMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Reads blocks on SSD, of one loaded model and of all that are not loaded, and compares their checksums.
     * Damaged ones go into quarantine. Loads no model. Only for operators. Reads at the full speed of the disk, so a large cache takes many minutes: with
     * `block_limit` it is checked a part at a time. When the caller cancels or
     * its deadline passes, it ends within 64 blocks, and the next check continues from there.
     * </pre>
     */
    public void verify(dev.icehouse.v1.VerifyRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.VerifyResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncServerStreamingCall(
          getChannel().newCall(getVerifyMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Sends the cached blocks of a prompt, or of a tenant, as an archive: one stream of bytes, in the clear, with
     * the prompts' tokens in it. Blocks that RAM alone has are written to SSD first. NOT_FOUND (BLOCK_NOT_FOUND)
     * when nothing is cached. When the caller cancels, or reads nothing for a while, it ends and leaves nothing.
     * </pre>
     */
    public void export(dev.icehouse.v1.ExportRequest request,
        io.grpc.stub.StreamObserver<dev.icehouse.v1.ExportResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncServerStreamingCall(
          getChannel().newCall(getExportMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Adopts the blocks of an archive as the caller's tenant's, each once it is verified, and up to the first byte
     * that is not as it was written. Nothing is removed for them: what passes the quota or the SSD limit is refused
     * and counted. NOT_FOUND (MODEL_NOT_FOUND) for the archive of another model; DEADLINE_EXCEEDED (MESSAGE_LATE)
     * when nothing comes for a while. Whoever may import decides what the tenant's requests reuse: give that to
     * those only who may speak for the tenant.
     * </pre>
     */
    public io.grpc.stub.StreamObserver<dev.icehouse.v1.ImportRequest> import_(
        io.grpc.stub.StreamObserver<dev.icehouse.v1.ImportResponse> responseObserver) {
      return io.grpc.stub.ClientCalls.asyncClientStreamingCall(
          getChannel().newCall(getImportMethod(), getCallOptions()), responseObserver);
    }
  }

  /**
   * A stub to allow clients to do synchronous rpc calls to service CacheService.
   * <pre>
   * Inspects and manages the prefix cache. Errors carry google.rpc details as InferenceService's do;
   * FAILED_PRECONDITION (CACHE_UNSUPPORTED) where the server has no cache, or not the tier that the command needs.
   * Authenticated callers manage only their own tenant's blocks; otherwise PERMISSION_DENIED (TENANT_FORBIDDEN,
   * OPERATOR_ONLY).
   * Warm, Evict, EvictAll and Verify may take minutes. Each is a stream: any number of `progress`, and `done` with
   * the result once, last.
   * </pre>
   */
  public static final class CacheServiceBlockingV2Stub
      extends io.grpc.stub.AbstractBlockingStub<CacheServiceBlockingV2Stub> {
    private CacheServiceBlockingV2Stub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected CacheServiceBlockingV2Stub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new CacheServiceBlockingV2Stub(channel, callOptions);
    }

    /**
     * <pre>
     * Returns what Generate would reuse of a prompt, without running it.
     * </pre>
     */
    public dev.icehouse.v1.ExplainResponse explain(dev.icehouse.v1.ExplainRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getExplainMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Brings a prompt into the RAM tier, without generating: blocks that are only on SSD are read, and what is missing
     * is computed. Less recently used blocks leave RAM for it, but none that running requests use. When the caller
     * cancels or its deadline passes, it stops, and what was computed by then is kept.
     * </pre>
     */
    @io.grpc.ExperimentalApi("https://github.com/grpc/grpc-java/issues/10918")
    public io.grpc.stub.BlockingClientCall<?, dev.icehouse.v1.WarmResponse>
        warm(dev.icehouse.v1.WarmRequest request) {
      return io.grpc.stub.ClientCalls.blockingV2ServerStreamingCall(
          getChannel(), getWarmMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Protects the cached blocks of a prompt from eviction by policy, until Unpin or for a time. NOT_FOUND
     * (BLOCK_NOT_FOUND) when none of them is cached.
     * </pre>
     */
    public dev.icehouse.v1.PinResponse pin(dev.icehouse.v1.PinRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getPinMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Removes the protection of Pin. Blocks that are not pinned are left as they are.
     * </pre>
     */
    public dev.icehouse.v1.UnpinResponse unpin(dev.icehouse.v1.UnpinRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getUnpinMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Says that a session, the conversation that `session_id` of a request names, has ended. Blocks that only its
     * requests and those of sessions that it started have used are evicted before all others from now on, and stay
     * until then. If the session goes on nevertheless, it reuses what is left, which is then as recently used as any
     * other. Nothing happens for a session that the server does not know; it remembers the last 4096.
     * </pre>
     */
    public dev.icehouse.v1.EndSessionResponse endSession(dev.icehouse.v1.EndSessionRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getEndSessionMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Removes the blocks of a prompt from both tiers, including pinned ones: those that are cached when it begins,
     * 256 at a time, the ends of prompts before their beginnings. Requests run in between; running ones keep their
     * copies. When the caller cancels or its deadline passes, it ends within 256 blocks: what was removed by then
     * is gone, the rest stays cached. What is cached meanwhile stays, too.
     * </pre>
     */
    @io.grpc.ExperimentalApi("https://github.com/grpc/grpc-java/issues/10918")
    public io.grpc.stub.BlockingClientCall<?, dev.icehouse.v1.EvictResponse>
        evict(dev.icehouse.v1.EvictRequest request) {
      return io.grpc.stub.ClientCalls.blockingV2ServerStreamingCall(
          getChannel(), getEvictMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Removes all blocks of a model, of every tenant, as Evict does, and forgets the earlier replies that stable
     * prompts (PROMPT_FORM_STABLE) begin with. Only for operators.
     * </pre>
     */
    @io.grpc.ExperimentalApi("https://github.com/grpc/grpc-java/issues/10918")
    public io.grpc.stub.BlockingClientCall<?, dev.icehouse.v1.EvictAllResponse>
        evictAll(dev.icehouse.v1.EvictAllRequest request) {
      return io.grpc.stub.ClientCalls.blockingV2ServerStreamingCall(
          getChannel(), getEvictAllMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Reads blocks on SSD, of one loaded model and of all that are not loaded, and compares their checksums.
     * Damaged ones go into quarantine. Loads no model. Only for operators. Reads at the full speed of the disk, so a large cache takes many minutes: with
     * `block_limit` it is checked a part at a time. When the caller cancels or
     * its deadline passes, it ends within 64 blocks, and the next check continues from there.
     * </pre>
     */
    @io.grpc.ExperimentalApi("https://github.com/grpc/grpc-java/issues/10918")
    public io.grpc.stub.BlockingClientCall<?, dev.icehouse.v1.VerifyResponse>
        verify(dev.icehouse.v1.VerifyRequest request) {
      return io.grpc.stub.ClientCalls.blockingV2ServerStreamingCall(
          getChannel(), getVerifyMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Sends the cached blocks of a prompt, or of a tenant, as an archive: one stream of bytes, in the clear, with
     * the prompts' tokens in it. Blocks that RAM alone has are written to SSD first. NOT_FOUND (BLOCK_NOT_FOUND)
     * when nothing is cached. When the caller cancels, or reads nothing for a while, it ends and leaves nothing.
     * </pre>
     */
    @io.grpc.ExperimentalApi("https://github.com/grpc/grpc-java/issues/10918")
    public io.grpc.stub.BlockingClientCall<?, dev.icehouse.v1.ExportResponse>
        export(dev.icehouse.v1.ExportRequest request) {
      return io.grpc.stub.ClientCalls.blockingV2ServerStreamingCall(
          getChannel(), getExportMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Adopts the blocks of an archive as the caller's tenant's, each once it is verified, and up to the first byte
     * that is not as it was written. Nothing is removed for them: what passes the quota or the SSD limit is refused
     * and counted. NOT_FOUND (MODEL_NOT_FOUND) for the archive of another model; DEADLINE_EXCEEDED (MESSAGE_LATE)
     * when nothing comes for a while. Whoever may import decides what the tenant's requests reuse: give that to
     * those only who may speak for the tenant.
     * </pre>
     */
    @io.grpc.ExperimentalApi("https://github.com/grpc/grpc-java/issues/10918")
    public io.grpc.stub.BlockingClientCall<dev.icehouse.v1.ImportRequest, dev.icehouse.v1.ImportResponse>
        import_() {
      return io.grpc.stub.ClientCalls.blockingClientStreamingCall(
          getChannel(), getImportMethod(), getCallOptions());
    }
  }

  /**
   * A stub to allow clients to do limited synchronous rpc calls to service CacheService.
   * <pre>
   * Inspects and manages the prefix cache. Errors carry google.rpc details as InferenceService's do;
   * FAILED_PRECONDITION (CACHE_UNSUPPORTED) where the server has no cache, or not the tier that the command needs.
   * Authenticated callers manage only their own tenant's blocks; otherwise PERMISSION_DENIED (TENANT_FORBIDDEN,
   * OPERATOR_ONLY).
   * Warm, Evict, EvictAll and Verify may take minutes. Each is a stream: any number of `progress`, and `done` with
   * the result once, last.
   * </pre>
   */
  public static final class CacheServiceBlockingStub
      extends io.grpc.stub.AbstractBlockingStub<CacheServiceBlockingStub> {
    private CacheServiceBlockingStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected CacheServiceBlockingStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new CacheServiceBlockingStub(channel, callOptions);
    }

    /**
     * <pre>
     * Returns what Generate would reuse of a prompt, without running it.
     * </pre>
     */
    public dev.icehouse.v1.ExplainResponse explain(dev.icehouse.v1.ExplainRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getExplainMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Brings a prompt into the RAM tier, without generating: blocks that are only on SSD are read, and what is missing
     * is computed. Less recently used blocks leave RAM for it, but none that running requests use. When the caller
     * cancels or its deadline passes, it stops, and what was computed by then is kept.
     * </pre>
     */
    public java.util.Iterator<dev.icehouse.v1.WarmResponse> warm(
        dev.icehouse.v1.WarmRequest request) {
      return io.grpc.stub.ClientCalls.blockingServerStreamingCall(
          getChannel(), getWarmMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Protects the cached blocks of a prompt from eviction by policy, until Unpin or for a time. NOT_FOUND
     * (BLOCK_NOT_FOUND) when none of them is cached.
     * </pre>
     */
    public dev.icehouse.v1.PinResponse pin(dev.icehouse.v1.PinRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getPinMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Removes the protection of Pin. Blocks that are not pinned are left as they are.
     * </pre>
     */
    public dev.icehouse.v1.UnpinResponse unpin(dev.icehouse.v1.UnpinRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getUnpinMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Says that a session, the conversation that `session_id` of a request names, has ended. Blocks that only its
     * requests and those of sessions that it started have used are evicted before all others from now on, and stay
     * until then. If the session goes on nevertheless, it reuses what is left, which is then as recently used as any
     * other. Nothing happens for a session that the server does not know; it remembers the last 4096.
     * </pre>
     */
    public dev.icehouse.v1.EndSessionResponse endSession(dev.icehouse.v1.EndSessionRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getEndSessionMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Removes the blocks of a prompt from both tiers, including pinned ones: those that are cached when it begins,
     * 256 at a time, the ends of prompts before their beginnings. Requests run in between; running ones keep their
     * copies. When the caller cancels or its deadline passes, it ends within 256 blocks: what was removed by then
     * is gone, the rest stays cached. What is cached meanwhile stays, too.
     * </pre>
     */
    public java.util.Iterator<dev.icehouse.v1.EvictResponse> evict(
        dev.icehouse.v1.EvictRequest request) {
      return io.grpc.stub.ClientCalls.blockingServerStreamingCall(
          getChannel(), getEvictMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Removes all blocks of a model, of every tenant, as Evict does, and forgets the earlier replies that stable
     * prompts (PROMPT_FORM_STABLE) begin with. Only for operators.
     * </pre>
     */
    public java.util.Iterator<dev.icehouse.v1.EvictAllResponse> evictAll(
        dev.icehouse.v1.EvictAllRequest request) {
      return io.grpc.stub.ClientCalls.blockingServerStreamingCall(
          getChannel(), getEvictAllMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Reads blocks on SSD, of one loaded model and of all that are not loaded, and compares their checksums.
     * Damaged ones go into quarantine. Loads no model. Only for operators. Reads at the full speed of the disk, so a large cache takes many minutes: with
     * `block_limit` it is checked a part at a time. When the caller cancels or
     * its deadline passes, it ends within 64 blocks, and the next check continues from there.
     * </pre>
     */
    public java.util.Iterator<dev.icehouse.v1.VerifyResponse> verify(
        dev.icehouse.v1.VerifyRequest request) {
      return io.grpc.stub.ClientCalls.blockingServerStreamingCall(
          getChannel(), getVerifyMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Sends the cached blocks of a prompt, or of a tenant, as an archive: one stream of bytes, in the clear, with
     * the prompts' tokens in it. Blocks that RAM alone has are written to SSD first. NOT_FOUND (BLOCK_NOT_FOUND)
     * when nothing is cached. When the caller cancels, or reads nothing for a while, it ends and leaves nothing.
     * </pre>
     */
    public java.util.Iterator<dev.icehouse.v1.ExportResponse> export(
        dev.icehouse.v1.ExportRequest request) {
      return io.grpc.stub.ClientCalls.blockingServerStreamingCall(
          getChannel(), getExportMethod(), getCallOptions(), request);
    }
  }

  /**
   * A stub to allow clients to do ListenableFuture-style rpc calls to service CacheService.
   * <pre>
   * Inspects and manages the prefix cache. Errors carry google.rpc details as InferenceService's do;
   * FAILED_PRECONDITION (CACHE_UNSUPPORTED) where the server has no cache, or not the tier that the command needs.
   * Authenticated callers manage only their own tenant's blocks; otherwise PERMISSION_DENIED (TENANT_FORBIDDEN,
   * OPERATOR_ONLY).
   * Warm, Evict, EvictAll and Verify may take minutes. Each is a stream: any number of `progress`, and `done` with
   * the result once, last.
   * </pre>
   */
  public static final class CacheServiceFutureStub
      extends io.grpc.stub.AbstractFutureStub<CacheServiceFutureStub> {
    private CacheServiceFutureStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected CacheServiceFutureStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new CacheServiceFutureStub(channel, callOptions);
    }

    /**
     * <pre>
     * Returns what Generate would reuse of a prompt, without running it.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<dev.icehouse.v1.ExplainResponse> explain(
        dev.icehouse.v1.ExplainRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getExplainMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * Protects the cached blocks of a prompt from eviction by policy, until Unpin or for a time. NOT_FOUND
     * (BLOCK_NOT_FOUND) when none of them is cached.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<dev.icehouse.v1.PinResponse> pin(
        dev.icehouse.v1.PinRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getPinMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * Removes the protection of Pin. Blocks that are not pinned are left as they are.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<dev.icehouse.v1.UnpinResponse> unpin(
        dev.icehouse.v1.UnpinRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getUnpinMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * Says that a session, the conversation that `session_id` of a request names, has ended. Blocks that only its
     * requests and those of sessions that it started have used are evicted before all others from now on, and stay
     * until then. If the session goes on nevertheless, it reuses what is left, which is then as recently used as any
     * other. Nothing happens for a session that the server does not know; it remembers the last 4096.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<dev.icehouse.v1.EndSessionResponse> endSession(
        dev.icehouse.v1.EndSessionRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getEndSessionMethod(), getCallOptions()), request);
    }
  }

  private static final int METHODID_EXPLAIN = 0;
  private static final int METHODID_WARM = 1;
  private static final int METHODID_PIN = 2;
  private static final int METHODID_UNPIN = 3;
  private static final int METHODID_END_SESSION = 4;
  private static final int METHODID_EVICT = 5;
  private static final int METHODID_EVICT_ALL = 6;
  private static final int METHODID_VERIFY = 7;
  private static final int METHODID_EXPORT = 8;
  private static final int METHODID_IMPORT = 9;

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
        case METHODID_EXPLAIN:
          serviceImpl.explain((dev.icehouse.v1.ExplainRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.ExplainResponse>) responseObserver);
          break;
        case METHODID_WARM:
          serviceImpl.warm((dev.icehouse.v1.WarmRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.WarmResponse>) responseObserver);
          break;
        case METHODID_PIN:
          serviceImpl.pin((dev.icehouse.v1.PinRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.PinResponse>) responseObserver);
          break;
        case METHODID_UNPIN:
          serviceImpl.unpin((dev.icehouse.v1.UnpinRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.UnpinResponse>) responseObserver);
          break;
        case METHODID_END_SESSION:
          serviceImpl.endSession((dev.icehouse.v1.EndSessionRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.EndSessionResponse>) responseObserver);
          break;
        case METHODID_EVICT:
          serviceImpl.evict((dev.icehouse.v1.EvictRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.EvictResponse>) responseObserver);
          break;
        case METHODID_EVICT_ALL:
          serviceImpl.evictAll((dev.icehouse.v1.EvictAllRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.EvictAllResponse>) responseObserver);
          break;
        case METHODID_VERIFY:
          serviceImpl.verify((dev.icehouse.v1.VerifyRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.VerifyResponse>) responseObserver);
          break;
        case METHODID_EXPORT:
          serviceImpl.export((dev.icehouse.v1.ExportRequest) request,
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.ExportResponse>) responseObserver);
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
        case METHODID_IMPORT:
          return (io.grpc.stub.StreamObserver<Req>) serviceImpl.import_(
              (io.grpc.stub.StreamObserver<dev.icehouse.v1.ImportResponse>) responseObserver);
        default:
          throw new AssertionError();
      }
    }
  }

  public static final io.grpc.ServerServiceDefinition bindService(AsyncService service) {
    return io.grpc.ServerServiceDefinition.builder(getServiceDescriptor())
        .addMethod(
          getExplainMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              dev.icehouse.v1.ExplainRequest,
              dev.icehouse.v1.ExplainResponse>(
                service, METHODID_EXPLAIN)))
        .addMethod(
          getWarmMethod(),
          io.grpc.stub.ServerCalls.asyncServerStreamingCall(
            new MethodHandlers<
              dev.icehouse.v1.WarmRequest,
              dev.icehouse.v1.WarmResponse>(
                service, METHODID_WARM)))
        .addMethod(
          getPinMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              dev.icehouse.v1.PinRequest,
              dev.icehouse.v1.PinResponse>(
                service, METHODID_PIN)))
        .addMethod(
          getUnpinMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              dev.icehouse.v1.UnpinRequest,
              dev.icehouse.v1.UnpinResponse>(
                service, METHODID_UNPIN)))
        .addMethod(
          getEndSessionMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              dev.icehouse.v1.EndSessionRequest,
              dev.icehouse.v1.EndSessionResponse>(
                service, METHODID_END_SESSION)))
        .addMethod(
          getEvictMethod(),
          io.grpc.stub.ServerCalls.asyncServerStreamingCall(
            new MethodHandlers<
              dev.icehouse.v1.EvictRequest,
              dev.icehouse.v1.EvictResponse>(
                service, METHODID_EVICT)))
        .addMethod(
          getEvictAllMethod(),
          io.grpc.stub.ServerCalls.asyncServerStreamingCall(
            new MethodHandlers<
              dev.icehouse.v1.EvictAllRequest,
              dev.icehouse.v1.EvictAllResponse>(
                service, METHODID_EVICT_ALL)))
        .addMethod(
          getVerifyMethod(),
          io.grpc.stub.ServerCalls.asyncServerStreamingCall(
            new MethodHandlers<
              dev.icehouse.v1.VerifyRequest,
              dev.icehouse.v1.VerifyResponse>(
                service, METHODID_VERIFY)))
        .addMethod(
          getExportMethod(),
          io.grpc.stub.ServerCalls.asyncServerStreamingCall(
            new MethodHandlers<
              dev.icehouse.v1.ExportRequest,
              dev.icehouse.v1.ExportResponse>(
                service, METHODID_EXPORT)))
        .addMethod(
          getImportMethod(),
          io.grpc.stub.ServerCalls.asyncClientStreamingCall(
            new MethodHandlers<
              dev.icehouse.v1.ImportRequest,
              dev.icehouse.v1.ImportResponse>(
                service, METHODID_IMPORT)))
        .build();
  }

  private static abstract class CacheServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoFileDescriptorSupplier, io.grpc.protobuf.ProtoServiceDescriptorSupplier {
    CacheServiceBaseDescriptorSupplier() {}

    @java.lang.Override
    public com.google.protobuf.Descriptors.FileDescriptor getFileDescriptor() {
      return dev.icehouse.v1.CacheServiceOuterClass.getDescriptor();
    }

    @java.lang.Override
    public com.google.protobuf.Descriptors.ServiceDescriptor getServiceDescriptor() {
      return getFileDescriptor().findServiceByName("CacheService");
    }
  }

  private static final class CacheServiceFileDescriptorSupplier
      extends CacheServiceBaseDescriptorSupplier {
    CacheServiceFileDescriptorSupplier() {}
  }

  private static final class CacheServiceMethodDescriptorSupplier
      extends CacheServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoMethodDescriptorSupplier {
    private final java.lang.String methodName;

    CacheServiceMethodDescriptorSupplier(java.lang.String methodName) {
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
      synchronized (CacheServiceGrpc.class) {
        result = serviceDescriptor;
        if (result == null) {
          serviceDescriptor = result = io.grpc.ServiceDescriptor.newBuilder(SERVICE_NAME)
              .setSchemaDescriptor(new CacheServiceFileDescriptorSupplier())
              .addMethod(getExplainMethod())
              .addMethod(getWarmMethod())
              .addMethod(getPinMethod())
              .addMethod(getUnpinMethod())
              .addMethod(getEndSessionMethod())
              .addMethod(getEvictMethod())
              .addMethod(getEvictAllMethod())
              .addMethod(getVerifyMethod())
              .addMethod(getExportMethod())
              .addMethod(getImportMethod())
              .build();
        }
      }
    }
    return result;
  }
}
