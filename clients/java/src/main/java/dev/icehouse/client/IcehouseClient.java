package dev.icehouse.client;

import static dev.icehouse.client.IcehouseException.translated;

import dev.icehouse.v1.CacheStatsRequest;
import dev.icehouse.v1.CacheStatsResponse;
import dev.icehouse.v1.CancelRequestRequest;
import dev.icehouse.v1.DetokenizeRequest;
import dev.icehouse.v1.EmbedRequest;
import dev.icehouse.v1.EmbedResponse;
import dev.icehouse.v1.EmbeddingServiceGrpc;
import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.GenerateResponse;
import dev.icehouse.v1.GetServerRequest;
import dev.icehouse.v1.InferenceServiceGrpc;
import dev.icehouse.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;
import dev.icehouse.v1.ListModelsRequest;
import dev.icehouse.v1.ListRequestsRequest;
import dev.icehouse.v1.ListRequestsResponse;
import dev.icehouse.v1.Model;
import dev.icehouse.v1.ModelServiceGrpc;
import dev.icehouse.v1.RequestInfo;
import dev.icehouse.v1.RerankRequest;
import dev.icehouse.v1.RerankResponse;
import dev.icehouse.v1.RerankServiceGrpc;
import dev.icehouse.v1.Server;
import dev.icehouse.v1.ServerServiceGrpc;
import dev.icehouse.v1.ServerServiceGrpc.ServerServiceBlockingStub;
import dev.icehouse.v1.TokenizeRequest;
import dev.icehouse.v1.TokenizeResponse;
import io.grpc.Channel;
import io.grpc.ChannelCredentials;
import io.grpc.ClientInterceptor;
import io.grpc.ClientInterceptors;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.stub.MetadataUtils;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;

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

  private IcehouseClient(ManagedChannel connection, Channel channel) {
    this.connection = connection;
    this.channel = channel;
  }

  /** Returns a client of a server without TLS: "host:port", "unix:/path" or any other gRPC target. */
  public static IcehouseClient connect(String address) {
    return to(address).build();
  }

  /** Returns a builder of a client; the first call connects. */
  public static Builder to(String address) {
    return new Builder(address);
  }

  /**
   * Returns a client over the same connection whose calls carry this too; an "authorization" in it goes in place of
   * the token. To close either client closes both.
   */
  public IcehouseClient withMetadata(Metadata metadata) {
    var attached = MetadataUtils.newAttachHeadersInterceptor(metadata);
    return new IcehouseClient(connection, ClientInterceptors.intercept(channel, attached));
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
    return translated(() -> inference(timeout).generate(request));
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
   * Returns the output read into a record, whose schema it is held to unless the request has a format of its own; see
   * {@link JsonOutput}. Throws IllegalStateException for an output that a limit cut.
   */
  public <T> T generateJson(GenerateRequest request, Class<T> type) {
    var output = JsonOutput.of(type);
    return output.read(generate(output.asked(request)));
  }

  /** The same connection for those who do not wait: futures, and publishers of streams. */
  public AsyncClient async() {
    return new AsyncClient(channel);
  }

  /** The server's prefix cache: warm, explain, pin, unpin, evict, verify, watchStats. */
  public CacheClient cache() {
    return new CacheClient(channel);
  }

  /** Returns a vector for each input, and what they cost. Retried as generate is. */
  public EmbedResponse embed(EmbedRequest request) {
    return translated(() -> EmbeddingServiceGrpc.newBlockingStub(channel).embed(request));
  }

  /** Returns the documents in the order in which they answer the query, best first. Retried as generate is. */
  public RerankResponse rerank(RerankRequest request) {
    return translated(() -> RerankServiceGrpc.newBlockingStub(channel).rerank(request));
  }

  /** Returns the tokens of a prompt. */
  public TokenizeResponse tokenize(TokenizeRequest request) {
    return translated(() -> inference(Optional.empty()).tokenize(request));
  }

  /** Returns the text of tokens. */
  public String detokenize(Iterable<Integer> tokenIds) {
    var request = DetokenizeRequest.newBuilder().addAllTokenIds(tokenIds).build();
    return translated(() -> inference(Optional.empty()).detokenize(request)).getText();
  }

  /** Returns the served models. */
  public List<Model> listModels() {
    var request = ListModelsRequest.getDefaultInstance();
    return translated(() -> ModelServiceGrpc.newBlockingStub(channel).listModels(request)).getModelsList();
  }

  /** Returns the server's counters. */
  public CacheStatsResponse cacheStats() {
    return translated(() -> inference(Optional.empty()).cacheStats(CacheStatsRequest.getDefaultInstance()));
  }

  /** Returns the server's version, state, features and limits. */
  public Server getServer() {
    return translated(() -> server().getServer(GetServerRequest.getDefaultInstance())).getServer();
  }

  /** Returns the requests that wait or run, the oldest first: an operator's sees those of all tenants. */
  public List<RequestInfo> listRequests() {
    var found = new ArrayList<RequestInfo>();
    var request = ListRequestsRequest.newBuilder().setPageSize(1000);
    do {
      ListRequestsResponse page = translated(() -> server().listRequests(request.build()));
      found.addAll(page.getRequestsList());
      request.setPageToken(page.getNextPageToken());
    } while (!request.getPageToken().isEmpty());
    return found;
  }

  /** Ends a request, another caller's too for operators; returns what it was. */
  public RequestInfo cancelRequest(String requestId) {
    var request = CancelRequestRequest.newBuilder().setRequestId(requestId).build();
    return translated(() -> server().cancelRequest(request)).getRequest();
  }

  /**
   * Ends a request of a tenant, for operators: several tenants may have requests of one id, and one of them must then
   * be named; "" is the default tenant.
   */
  public RequestInfo cancelRequest(String requestId, String tenant) {
    var request = CancelRequestRequest.newBuilder().setRequestId(requestId).setTenant(tenant).build();
    return translated(() -> server().cancelRequest(request)).getRequest();
  }

  /**
   * Returns once the server takes requests: it listens, be it yet to start, and its model is loaded. Throws
   * DEADLINE_EXCEEDED when late, with what came last in the message.
   */
  public Server waitReady(Duration timeout) {
    return Readiness.await(server(), timeout);
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

  private ServerServiceBlockingStub server() {
    return ServerServiceGrpc.newBlockingStub(channel);
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
    private Optional<BearerToken> token = Optional.empty();
    private Optional<Duration> timeout = Optional.of(DEFAULT_TIMEOUT);
    private Optional<Duration> orderTimeout = Optional.of(DEFAULT_ORDER_TIMEOUT);
    private int retryLimit;
    private final List<ClientInterceptor> interceptors = new ArrayList<>();
    private final Map<String, Object> serviceConfig = ServiceConfig.published();

    private Builder(String address) {
      if (address.isBlank()) {
        throw new IllegalArgumentException(
            "the address is \"" + address + "\"; it must be host:port, such as localhost:50051, or unix:/path");
      }
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
      this.token = Optional.of(BearerToken.of(token));
      return this;
    }

    /**
     * Sends the token that the source returns. It is kept until the server refuses it (UNAUTHENTICATED); then the
     * source is asked anew, and the refused call, of which nothing has run, is made again, once. One call at a time
     * asks it.
     */
    public Builder tokenSource(Supplier<String> source) {
      this.token = Optional.of(BearerToken.from(source));
      return this;
    }

    /** Adds gRPC's own interceptors, such as those of tracing; each sees every attempt of a call. */
    public Builder intercept(ClientInterceptor... interceptors) {
      this.interceptors.addAll(List.of(interceptors));
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
     * Sends generate, embed and rerank again, at most so often, where the server refuses them for now and says when
     * to come back ({@link IcehouseException#retryAfter}), but never past their deadline. Without it they throw.
     */
    public Builder retryLimit(int count) {
      if (count < 0) {
        throw new IllegalArgumentException("the retry limit is " + count + ", and must be at least 0");
      }
      this.retryLimit = count;
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
              .maxInboundMessageSize(Integer.MAX_VALUE)
              .intercept(interceptors);
      if (LocalTarget.isLocal(address)) {
        channel.proxyDetector(server -> null);
      }
      serverName.ifPresent(channel::overrideAuthority);
      var defaults = new CallDefaults(timeout, orderTimeout, token, new RetryPolicy(retryLimit));
      ManagedChannel connection = channel.build();
      return new IcehouseClient(connection, ClientInterceptors.intercept(connection, defaults));
    }
  }
}
