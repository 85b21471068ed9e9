package dev.icehouse.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.icehouse.v1.CachePolicy;
import dev.icehouse.v1.CacheServiceGrpc;
import dev.icehouse.v1.CacheStatsRequest;
import dev.icehouse.v1.ChatMessage;
import dev.icehouse.v1.ChatPrompt;
import dev.icehouse.v1.EmbedInput;
import dev.icehouse.v1.EmbedRequest;
import dev.icehouse.v1.EvictRequest;
import dev.icehouse.v1.ExplainRequest;
import dev.icehouse.v1.FinishReason;
import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.GetModelRequest;
import dev.icehouse.v1.InferenceServiceGrpc;
import dev.icehouse.v1.ListModelsRequest;
import dev.icehouse.v1.ModelServiceGrpc;
import dev.icehouse.v1.PinRequest;
import dev.icehouse.v1.RerankRequest;
import dev.icehouse.v1.SamplingParams;
import dev.icehouse.v1.Token;
import dev.icehouse.v1.TokenPrompt;
import dev.icehouse.v1.TokenizeRequest;
import dev.icehouse.v1.UnpinRequest;
import dev.icehouse.v1.VerifyRequest;
import dev.icehouse.v1.WarmRequest;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import java.io.File;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;

/** Against real servers; `make test-clients` starts them. */
@EnabledIfEnvironmentVariable(named = Servers.VARIABLE, matches = ".+")
class LiveTest {
  private static final GenerateRequest ENDLESS =
      GenerateRequest.newBuilder().setText("Once").setMaxOutputTokens(4000).build();
  private static final GenerateRequest SHORT =
      GenerateRequest.newBuilder().setText("Hi").setMaxOutputTokens(1).build();

  private final Servers servers = Servers.told();

  private static IcehouseException refusal(IcehouseClient client, GenerateRequest request) {
    return assertThrows(IcehouseException.class, () -> client.generate(request));
  }

  @Test
  void streamGivesWhatGenerateGives() {
    var request = GenerateRequest.newBuilder().setText("Once upon a time").setMaxOutputTokens(8).build();
    try (var client = IcehouseClient.connect(servers.address); var stream = client.stream(request)) {
      var whole = client.generate(request);
      assertThrows(IllegalStateException.class, stream::reply);
      var text = new StringBuilder();
      for (String piece : stream) {
        assertFalse(piece.isEmpty());
        text.append(piece);
      }
      Reply reply = stream.reply();
      assertEquals(whole.getText(), text.toString());
      assertEquals(whole.getText(), reply.text());
      assertEquals(whole.getTokenIdsList(), reply.tokenIds());
      assertEquals(8, reply.tokenIds().size());
      assertEquals(servers.model, reply.started().getModel());
      assertEquals(FinishReason.FINISH_REASON_LENGTH, reply.finished().getFinishReason());
    }
  }

  @Test
  void ofSeveralCompletionsTheFirstIsTheReply() {
    var sampling = SamplingParams.newBuilder().setTemperature(1).setSeed(7);
    var request =
        GenerateRequest.newBuilder()
            .setText("Once")
            .setMaxOutputTokens(8)
            .setCompletions(2)
            .setSampling(sampling)
            .build();
    try (var client = IcehouseClient.connect(servers.address); var stream = client.stream(request)) {
      var both = client.generate(request).getCompletionsList();
      assertNotEquals(both.get(0).getText(), both.get(1).getText());
      var text = new StringBuilder();
      stream.forEach(text::append);
      assertEquals(both.get(0).getText(), text.toString());
      assertEquals(both.get(0).getText(), stream.reply().text());
      assertEquals(both.get(0).getTokenIdsList(), stream.reply().tokenIds());
    }
  }

  @Test
  void promptsOfEveryKind() {
    var user = ChatMessage.newBuilder().setRole("user").setContent("Hi");
    try (var client = IcehouseClient.connect(servers.address)) {
      for (GenerateRequest.Builder request :
          List.of(
              GenerateRequest.newBuilder().setText("Hi"),
              GenerateRequest.newBuilder().setTokens(TokenPrompt.newBuilder().addIds(10).addIds(11)),
              GenerateRequest.newBuilder().setChat(ChatPrompt.newBuilder().addMessages(user)))) {
        var response = client.generate(request.setMaxOutputTokens(1).build());
        assertEquals(1, response.getUsage().getOutputTokens());
      }
    }
  }

  @Test
  void aRefusalSaysWhatIsWrong() {
    var wrong = GenerateRequest.newBuilder().setText("Hi").setMaxOutputTokens(-1).build();
    try (var client = IcehouseClient.connect(servers.address); var stream = client.stream(wrong)) {
      var streamed = assertThrows(IcehouseException.class, () -> stream.iterator().hasNext());
      for (IcehouseException error : List.of(refusal(client, wrong), streamed)) {
        assertEquals(Status.Code.INVALID_ARGUMENT, error.code());
        assertEquals("PARAMETER_OUT_OF_RANGE", error.reason());
        assertEquals(Optional.of("max_output_tokens"), error.field());
        assertEquals(Optional.empty(), error.retryAfter());
        assertFalse(error.metadata().isEmpty());
      }
    }
  }

  @Test
  void whoUsedUpItsTokensIsToldWhenToComeBack() {
    var tenant = CachePolicy.newBuilder().setTenant("java-" + ProcessHandle.current().pid());
    var request =
        GenerateRequest.newBuilder()
            .setText("Once")
            .setMaxOutputTokens(servers.tokensPerMinute)
            .setCache(tenant)
            .build();
    try (var client = IcehouseClient.connect(servers.limitedAddress)) {
      client.generate(request);
      var error = refusal(client, request);
      assertEquals(Status.Code.RESOURCE_EXHAUSTED, error.code());
      assertEquals("TOKEN_RATE_EXCEEDED", error.reason());
      Duration delay = error.retryAfter().orElseThrow();
      assertTrue(!delay.isNegative() && !delay.isZero() && delay.compareTo(Duration.ofMinutes(2)) <= 0, delay.toString());
    }
  }

  @Test
  @Timeout(30)
  void closingAStreamEndsItOnTheServer() {
    try (var client = IcehouseClient.connect(servers.address)) {
      var inference = InferenceServiceGrpc.newBlockingStub(client.channel());
      var ask = CacheStatsRequest.getDefaultInstance();
      long before = inference.cacheStats(ask).getEngine().getCancelledTotal();
      try (var stream = client.stream(ENDLESS)) {
        assertTrue(stream.iterator().hasNext());
      }
      while (inference.cacheStats(ask).getEngine().getCancelledTotal() == before) {}
    }
  }

  @Test
  void aClosedStreamTellsItsReader() {
    try (var client = IcehouseClient.connect(servers.address); var stream = client.stream(ENDLESS)) {
      var error =
          assertThrows(
              IcehouseException.class,
              () -> {
                for (String piece : stream) {
                  stream.close();
                }
              });
      assertEquals(Status.Code.CANCELLED, error.code());
    }
  }

  @Test
  void aDeadlineEndsAStream() {
    try (var client = IcehouseClient.connect(servers.address);
        var stream = client.stream(ENDLESS, Duration.ofMillis(200))) {
      var error =
          assertThrows(IcehouseException.class, () -> stream.iterator().forEachRemaining(text -> {}));
      assertEquals(Status.Code.DEADLINE_EXCEEDED, error.code());
    }
  }

  @Test
  void aSecuredServerWantsItsAuthorityAndAToken() throws Exception {
    var trusting = TlsChannelCredentials.newBuilder().trustManager(new File(servers.caPath)).build();
    var known = IcehouseClient.to(servers.securedAddress).credentials(trusting);
    try (var nobody = known.build();
        var somebody = known.token("wrong").build();
        var tenant = known.token(servers.token).build();
        var distrustful = known.credentials(TlsChannelCredentials.create()).build()) {
      assertEquals(1, tenant.generate(SHORT).getUsage().getOutputTokens());
      assertEquals("CREDENTIALS_MISSING", refusal(nobody, SHORT).reason());
      assertEquals("CREDENTIALS_INVALID", refusal(somebody, SHORT).reason());
      assertEquals("UNAVAILABLE", refusal(distrustful, SHORT).reason());
    }
  }

  @Test
  void theOtherServicesAreThereToo() {
    try (var client = IcehouseClient.connect(servers.address)) {
      var models = ModelServiceGrpc.newBlockingStub(client.channel());
      var listed = models.listModels(ListModelsRequest.getDefaultInstance()).getModelsList();
      assertEquals(List.of(servers.model), listed.stream().map(model -> model.getId()).toList());
      var cache = CacheServiceGrpc.newBlockingStub(client.channel());
      cache.explain(ExplainRequest.newBuilder().setText("Hi").build());
      var none = GetModelRequest.newBuilder().setModel("none").build();
      var failure = assertThrows(StatusRuntimeException.class, () -> models.getModel(none));
      assertEquals("MODEL_NOT_FOUND", new IcehouseException(failure).reason());
    }
  }

  @Test
  void theCacheTakesOrdersAndTellsHowFarTheyAre() {
    String text = "The ice house keeps what was cut in winter. ".repeat(8);
    var tenant = CachePolicy.newBuilder().setTenant("java-cache-" + ProcessHandle.current().pid());
    try (var client = IcehouseClient.connect(servers.address)) {
      var progress = new ArrayList<Integer>();
      var warm = WarmRequest.newBuilder().setText(text).setCache(tenant).build();
      var warmed = client.cache().warm(warm, done -> progress.add(done.getPromptTokens()));
      assertEquals(warmed.getUsage().getPromptTokens(), progress.get(0));
      var explain = ExplainRequest.newBuilder().setText(text).setCache(tenant).build();
      int blockCount = client.cache().explain(explain).getBlocksCount();
      assertTrue(blockCount > 0);
      var pin = PinRequest.newBuilder().setText(text).setCache(tenant).build();
      assertEquals(blockCount, client.cache().pin(pin).getBlockCount());
      var unpin = UnpinRequest.newBuilder().setText(text).setCache(tenant).build();
      assertEquals(blockCount, client.cache().unpin(unpin).getBlockCount());
      var evict = EvictRequest.newBuilder().setText(text).setCache(tenant).build();
      assertEquals(blockCount, client.cache().evict(evict, done -> {}).getRamBlockCount());
      assertEquals(0, client.cache().explain(explain).getCache().getCachedTokens());
      var verified = client.cache().verify(VerifyRequest.getDefaultInstance(), done -> {});
      assertEquals(0, verified.getDamagedBlockCount());
      try (var counters = client.cache().watchStats(Duration.ofSeconds(1))) {
        assertTrue(counters.iterator().next().getStats().hasEngine());
      }
    }
  }

  @Test
  void aServerTellsWhatItIsAndWorksOnAndEndsIt() {
    var request = ENDLESS.toBuilder().setRequestId("java-" + ProcessHandle.current().pid()).build();
    try (var client = IcehouseClient.connect(servers.address); var stream = client.stream(request)) {
      assertFalse(client.waitReady(Duration.ofMinutes(1)).getVersion().isEmpty());
      assertEquals(servers.model, client.listModels().get(0).getId());
      assertTrue(client.cacheStats().hasEngine());
      var texts = stream.iterator();
      assertTrue(texts.hasNext());
      assertTrue(client.listRequests().stream().anyMatch(info -> info.getRequestId().equals(request.getRequestId())));
      assertEquals(request.getRequestId(), client.cancelRequest(request.getRequestId()).getRequestId());
      var ended = assertThrows(IcehouseException.class, () -> texts.forEachRemaining(text -> {}));
      assertEquals(Status.Code.CANCELLED, ended.code());
    }
  }

  @Test
  void textsBecomeVectorsRankingsAndTokens() {
    try (var client = IcehouseClient.connect(servers.address)) {
      var embed = EmbedRequest.newBuilder().addInputs(EmbedInput.newBuilder().setText("ice")).build();
      assertEquals(1, client.embed(embed).getEmbeddingsCount());
      var rerank =
          RerankRequest.newBuilder()
              .setQuery("ice")
              .addDocuments("a house")
              .setText("{query} {document}")
              .setPositiveAnswer("y")
              .setNegativeAnswer("n");
      assertTrue(client.rerank(rerank.build()).getPromptTokens() > 0);
      var tokens = client.tokenize(TokenizeRequest.newBuilder().setText("Once upon a time").build());
      assertEquals("Once upon a time", client.detokenize(tokens.getTokensList().stream().map(Token::getId).toList()));
    }
  }

  @Test
  void noServerIsAnErrorToo() throws Exception {
    int port;
    try (var unused = new ServerSocket(0, 1, InetAddress.getLoopbackAddress())) {
      port = unused.getLocalPort();
    }
    try (var client = IcehouseClient.connect("127.0.0.1:" + port)) {
      var error = refusal(client, SHORT);
      assertEquals(Status.Code.UNAVAILABLE, error.code());
      assertEquals("UNAVAILABLE", error.reason());
    }
  }
}
