package dev.icehouse.client;

import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.GenerateResponse;
import dev.icehouse.v1.InferenceServiceGrpc;
import dev.icehouse.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;
import io.grpc.Channel;
import io.grpc.ChannelCredentials;
import io.grpc.ClientInterceptor;
import io.grpc.ClientInterceptors;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.StatusRuntimeException;
import java.time.Duration;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.TimeUnit;

/**
 * A connection to one server, or to all that a name resolves to. Safe for use from several threads. Every
 * method throws {@link IcehouseException}.
 */
public final class IcehouseClient implements AutoCloseable {
  /** The deadline of a call that names none. */
  public static final Duration DEFAULT_TIMEOUT = Duration.ofSeconds(120);

  /** The deadline of Warm, Evict and Verify that name none: a long prompt or a large disk takes its time. */
  public static final Duration DEFAULT_ORDER_TIMEOUT = Duration.ofHours(1);

  private static final Duration CLOSE_TIMEOUT = Duration.ofSeconds(5);

  private final ManagedChannel connection;
  private final Channel channel;

  private IcehouseClient(ManagedChannel connection, ClientInterceptor defaults) {
    this.connection = connection;
    this.channel = ClientInterceptors.intercept(connection, defaults);
  }

  /** Returns a client of a server without TLS: "host:port", "unix:/path" or any other gRPC target. */
  public static IcehouseClient connect(String address) {
    return to(address).build();
  }

  /** Returns a builder of a client; the first call connects. */
  public static Builder to(String address) {
    return new Builder(address);
  }

  /** Returns the whole output. Retried while no server takes it, until the deadline. */
  public GenerateResponse generate(GenerateRequest request) {
    return generate(request, Optional.empty());
  }

  /** As {@link #generate(GenerateRequest)}, with a deadline of its own. */
  public GenerateResponse generate(GenerateRequest request, Duration timeout) {
    return generate(request, Optional.of(timeout));
  }

  private GenerateResponse generate(GenerateRequest request, Optional<Duration> timeout) {
    try {
      return inference(timeout).generate(request);
    } catch (StatusRuntimeException failure) {
      throw new IcehouseException(failure);
    }
  }

  /** Begins an output that comes piece by piece; a refusal is thrown by its iteration. Never retried. */
  public TextStream stream(GenerateRequest request) {
    return new TextStream(inference(Optional.empty()), request);
  }

  /** As {@link #stream(GenerateRequest)}, with a deadline of its own. */
  public TextStream stream(GenerateRequest request, Duration timeout) {
    return new TextStream(inference(Optional.of(timeout)), request);
  }

  /**
   * The connection, for the generated stubs of all services: they get the deadline, the token and the
   * prefix key, and what they throw can be given to {@link IcehouseException}.
   */
  public Channel channel() {
    return channel;
  }

  /** Ends the connection and what runs on it. */
  @Override
  public void close() {
    connection.shutdownNow();
    try {
      connection.awaitTermination(CLOSE_TIMEOUT.toMillis(), TimeUnit.MILLISECONDS);
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
    }
  }

  private InferenceServiceBlockingStub inference(Optional<Duration> timeout) {
    InferenceServiceBlockingStub stub = InferenceServiceGrpc.newBlockingStub(channel);
    return timeout.map(limit -> stub.withDeadlineAfter(limit.toNanos(), TimeUnit.NANOSECONDS)).orElse(stub);
  }

  /** What there is to say about a connection. */
  public static final class Builder {
    private final String address;
    private ChannelCredentials credentials = InsecureChannelCredentials.create();
    private Optional<String> serverName = Optional.empty();
    private Optional<String> token = Optional.empty();
    private Optional<Duration> timeout = Optional.of(DEFAULT_TIMEOUT);
    private Optional<Duration> orderTimeout = Optional.of(DEFAULT_ORDER_TIMEOUT);
    private final Map<String, Object> serviceConfig = ServiceConfig.published();

    private Builder(String address) {
      this.address = address;
    }

    /** Secures the connection, such as with {@link io.grpc.TlsChannelCredentials}. */
    public Builder credentials(ChannelCredentials credentials) {
      this.credentials = credentials;
      return this;
    }

    /** Expects this name in the server's certificate instead of the address. */
    public Builder serverName(String serverName) {
      this.serverName = Optional.of(serverName);
      return this;
    }

    /** Sends a bearer token with every call. Without TLS whoever is on the way can read it. */
    public Builder token(String token) {
      this.token = Optional.of(token);
      return this;
    }

    /** Sets the deadline of calls that name none, in place of {@link #DEFAULT_TIMEOUT}. */
    public Builder timeout(Duration timeout) {
      this.timeout = Optional.of(timeout);
      return this;
    }

    /** Sets that of Warm, Evict and Verify, in place of {@link #DEFAULT_ORDER_TIMEOUT}. */
    public Builder orderTimeout(Duration timeout) {
      this.orderTimeout = Optional.of(timeout);
      return this;
    }

    /** Lets calls that name no deadline have none, Warm, Evict and Verify too. */
    public Builder withoutTimeout() {
      this.timeout = Optional.empty();
      this.orderTimeout = Optional.empty();
      return this;
    }

    /**
     * Uses servers whatever their health says: for those that answer health checks only to callers with
     * credentials, which gRPC does not send with them.
     */
    public Builder withoutHealthChecks() {
      serviceConfig.remove("healthCheckConfig");
      return this;
    }

    /** Returns the client. */
    public IcehouseClient build() {
      ManagedChannelBuilder<?> channel =
          Grpc.newChannelBuilder(address, credentials)
              .defaultServiceConfig(serviceConfig)
              // A prompt's tokens or a long output may pass gRPC's 4 MB.
              .maxInboundMessageSize(Integer.MAX_VALUE);
      serverName.ifPresent(channel::overrideAuthority);
      return new IcehouseClient(channel.build(), new CallDefaults(timeout, orderTimeout, token));
    }
  }
}
