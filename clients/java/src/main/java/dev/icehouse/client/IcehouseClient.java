package dev.icehouse.client;

import static dev.icehouse.client.IcehouseException.translated;

import com.google.protobuf.util.Durations;
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
import dev.icehouse.v1.GetStatsRequest;
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
import dev.icehouse.v1.ServerStats;
import dev.icehouse.v1.TokenizeRequest;
import dev.icehouse.v1.TokenizeResponse;
import dev.icehouse.v1.WatchStatsRequest;
import dev.icehouse.v1.WatchStatsResponse;
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
 * A client of one server, or of all servers that a name resolves to. Safe for use from several threads. Every method
 * throws {@link IcehouseException}.
 */
public final class IcehouseClient implements AutoCloseable {
  /** The default deadline of calls. */
  public static final Duration DEFAULT_TIMEOUT = Duration.ofSeconds(120);

  /** The default deadline of warm, evict, evictAll and verify: a long prompt or a large disk takes its time. */
  public static final Duration DEFAULT_COMMAND_TIMEOUT = Duration.ofHours(1);

  private static final Duration CLOSE_TIMEOUT = Duration.ofSeconds(5);

  private final ManagedChannel connection;
  private final Channel channel;

  private IcehouseClient(ManagedChannel connection, Channel channel) {
    this.connection = connection;
    this.channel = channel;
  }

  /** Returns a client without TLS. An address is "host:port", "unix:/path" or any other gRPC target. */
  public static IcehouseClient connect(String address) {
    return to(address).build();
  }

  /** Returns a builder of a client, which connects with its first call. */
  public static Builder to(String address) {
    return new Builder(address);
  }

  /**
   * Returns a client over the same connection whose calls carry this too; an "authorization" in it replaces the token.
   * Closing either client closes both.
   */
  public IcehouseClient withMetadata(Metadata metadata) {
    var attached = MetadataUtils.newAttachHeadersInterceptor(metadata);
    return new IcehouseClient(connection, ClientInterceptors.intercept(channel, attached));
  }

  /** Returns the whole output. Retried until the deadline while no server is available. */
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

  /** Begins an output that arrives in pieces. Its iteration throws if the call fails; it is never retried. */
  public TextStream stream(GenerateRequest request) {
    return new TextStream(inference(Optional.empty()), request);
  }

  /** As {@link #stream(GenerateRequest)}, with a deadline of its own. */
  public TextStream stream(GenerateRequest request, Duration timeout) {
    return new TextStream(inference(Optional.of(timeout)), request);
  }

  /**
   * Returns an output in JSON as a record; see {@link JsonOutput}. The output is constrained to the request's format,
   * or else to the JSON schema of the record. Throws IllegalStateException if a limit cut the output.
   */
  public <T> T generateJson(GenerateRequest request, Class<T> type) {
    var output = JsonOutput.of(type);
    return output.read(generate(output.asked(request)));
  }

  /** Calls over the same connection that do not block: they return futures and publishers. */
  public AsyncClient async() {
    return new AsyncClient(channel);
  }

  /** The server's prefix cache: explain, warm, pin, unpin, evict, evictAll, verify. */
  public CacheClient cache() {
    return new CacheClient(channel);
  }

  /** Returns a vector for each input. Retried as generate is. */
  public EmbedResponse embed(EmbedRequest request) {
    return translated(() -> EmbeddingServiceGrpc.newBlockingStub(channel).embed(request));
  }

  /** Ranks documents by how well they answer a query, best first. Retried as generate is. */
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

  /** Returns the counters of the prefix cache. Only for operators if callers authenticate. */
  public CacheStatsResponse cacheStats() {
    return translated(() -> inference(Optional.empty()).cacheStats(CacheStatsRequest.getDefaultInstance()));
  }

  /** Returns the counters of the engine, the cache and the tenants. */
  public ServerStats getStats() {
    return translated(() -> server().getStats(GetStatsRequest.getDefaultInstance())).getStats();
  }

  /** Begins to send the counters of {@link #getStats}, at once and then at an interval of 0.1 s to 1 h. */
  public ResponseStream<WatchStatsResponse> watchStats(Duration interval) {
    var request = WatchStatsRequest.newBuilder().setInterval(Durations.fromNanos(interval.toNanos())).build();
    return new ResponseStream<>(() -> server().watchStats(request));
  }

  /** Returns the server's version, state, features and limits. Answers while the model loads, too. */
  public Server getServer() {
    return translated(() -> server().getServer(GetServerRequest.getDefaultInstance())).getServer();
  }

  /** Returns the requests that wait or run, oldest first. Operators get those of all tenants. */
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

  /** Cancels a request and returns it as it was. Operators may cancel those of all tenants. */
  public RequestInfo cancelRequest(String requestId) {
    var request = CancelRequestRequest.newBuilder().setRequestId(requestId).build();
    return translated(() -> server().cancelRequest(request)).getRequest();
  }

  /**
   * As {@link #cancelRequest(String)}, for operators if several tenants have a request with this id; "" is the default
   * tenant.
   */
  public RequestInfo cancelRequest(String requestId, String tenant) {
    var request = CancelRequestRequest.newBuilder().setRequestId(requestId).setTenant(tenant).build();
    return translated(() -> server().cancelRequest(request)).getRequest();
  }

  /**
   * Waits until the server accepts requests: it may still have to start and to load its model. If that takes too long,
   * throws DEADLINE_EXCEEDED, whose message says what the server answered last.
   */
  public Server waitReady(Duration timeout) {
    return Readiness.await(server(), timeout);
  }

  /**
   * The connection, for the generated stubs of all services. Their calls get the deadline, the token and the prefix
   * key, and {@link IcehouseException} reads what they throw.
   */
  public Channel channel() {
    return channel;
  }

  /** Closes the connection and ends its calls. */
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

  /** Options of a client. */
  public static final class Builder {
    private final String address;
    private ChannelCredentials credentials = InsecureChannelCredentials.create();
    private Optional<String> serverName = Optional.empty();
    private Optional<BearerToken> token = Optional.empty();
    private Optional<Duration> timeout = Optional.of(DEFAULT_TIMEOUT);
    private Optional<Duration> commandTimeout = Optional.of(DEFAULT_COMMAND_TIMEOUT);
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

    /** Secures the connection, for example with {@link io.grpc.TlsChannelCredentials}. */
    public Builder credentials(ChannelCredentials credentials) {
      this.credentials = credentials;
      return this;
    }

    /** Sets the name in the server's certificate, if it is not the host of the address. */
    public Builder serverName(String serverName) {
      this.serverName = Optional.of(serverName);
      return this;
    }

    /** Sends a bearer token with every call. Use TLS, or others on the network can read it. */
    public Builder token(String token) {
      this.token = Optional.of(BearerToken.of(token));
      return this;
    }

    /**
     * Sends the token that the source returns. The source is called once, and again when the server refuses the token;
     * the refused call, of which nothing has run, is then sent once more. One call at a time asks the source.
     */
    public Builder tokenSource(Supplier<String> source) {
      this.token = Optional.of(BearerToken.from(source));
      return this;
    }

    /** Adds interceptors of gRPC, for example for tracing. They see every attempt of a call. */
    public Builder intercept(ClientInterceptor... interceptors) {
      this.interceptors.addAll(List.of(interceptors));
      return this;
    }

    /** Sets the deadline of calls that set none. Default: {@link #DEFAULT_TIMEOUT}. */
    public Builder timeout(Duration timeout) {
      this.timeout = Optional.of(timeout);
      return this;
    }

    /** The same for warm, evict, evictAll and verify. Default: {@link #DEFAULT_COMMAND_TIMEOUT}. */
    public Builder commandTimeout(Duration timeout) {
      this.commandTimeout = Optional.of(timeout);
      return this;
    }

    /** Gives no deadline to calls that set none, including warm, evict, evictAll and verify. */
    public Builder withoutTimeout() {
      this.timeout = Optional.empty();
      this.commandTimeout = Optional.empty();
      return this;
    }

    /**
     * Sends generate, embed and rerank again, at most so many times, when the server refuses them for now and says when
     * to try again ({@link IcehouseException#retryAfter}). They are never sent again after their deadline. Default: 0.
     */
    public Builder retryLimit(int count) {
      if (count < 0) {
        throw new IllegalArgumentException("the retry limit is " + count + "; it must be at least 0");
      }
      this.retryLimit = count;
      return this;
    }

    /**
     * Uses servers without checking their health. For servers that require credentials for health checks, because gRPC
     * sends none with them.
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
              // The tokens of a prompt or a long output may exceed gRPC's default of 4 MB.
              .maxInboundMessageSize(Integer.MAX_VALUE)
              .intercept(interceptors);
      if (LocalTarget.isLocal(address)) {
        channel.proxyDetector(server -> null);
      }
      serverName.ifPresent(channel::overrideAuthority);
      var defaults = new CallDefaults(timeout, commandTimeout, token, new RetryPolicy(retryLimit));
      ManagedChannel connection = channel.build();
      return new IcehouseClient(connection, ClientInterceptors.intercept(connection, defaults));
    }
  }
}
