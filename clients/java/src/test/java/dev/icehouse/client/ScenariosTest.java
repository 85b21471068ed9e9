package dev.icehouse.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.gson.JsonElement;
import com.google.gson.JsonParser;
import dev.icehouse.v1.CachePolicy;
import dev.icehouse.v1.ChoiceFormat;
import dev.icehouse.v1.EmbedInput;
import dev.icehouse.v1.EmbedRequest;
import dev.icehouse.v1.Embedding;
import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.GenerateResponse;
import dev.icehouse.v1.InfillPrompt;
import dev.icehouse.v1.Prompt;
import dev.icehouse.v1.RequestInfo;
import dev.icehouse.v1.RerankRequest;
import dev.icehouse.v1.RerankResult;
import dev.icehouse.v1.ResponseFormat;
import dev.icehouse.v1.Server;
import dev.icehouse.v1.Token;
import dev.icehouse.v1.TokenizeRequest;
import dev.icehouse.v1.Tool;
import dev.icehouse.v1.ToolCall;
import dev.icehouse.v1.ToolChoice;
import dev.icehouse.v1.ToolChoiceMode;
import io.grpc.ChannelCredentials;
import io.grpc.Metadata;
import io.grpc.TlsChannelCredentials;
import java.io.File;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.Comparator;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.Callable;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.Supplier;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;
import org.junit.jupiter.api.extension.ExtendWith;
import org.junit.jupiter.api.function.Executable;

/**
 * Each scenario of clients/scenarios.json with this client, those about the cache in {@link CacheScenariosTest};
 * `make test-clients` starts the servers.
 */
@EnabledIfEnvironmentVariable(named = Servers.VARIABLE, matches = ".+")
@ExtendWith(Scenario.Runner.class)
@Timeout(120)
class ScenariosTest {
  private final Servers servers = Servers.told();

  @Test
  void unary(Scenario s) {
    GenerateResponse answer = s.client().generate(s.request().build());
    int outputTokens = s.expect("output_tokens").getAsInt();
    assertEquals(outputTokens, answer.getUsage().getOutputTokens());
    assertEquals(outputTokens, answer.getTokenIdsCount());
    assertEquals("FINISH_REASON_" + s.expect("finish_reason").getAsString(), answer.getFinishReason().name());
    assertEquals(servers.model, answer.getModel());
  }

  @Test
  void stream(Scenario s) {
    var client = s.client();
    GenerateResponse whole = client.generate(s.request().build());
    TextStream stream = client.stream(s.request().build());
    assertEquals(whole.getText(), read(stream));
    Reply reply = stream.reply();
    assertEquals(whole.getText(), reply.text());
    assertEquals(whole.getTokenIdsList(), reply.tokenIds());
    assertEquals(whole.getUsage().getPromptTokens(), reply.finished().getUsage().getPromptTokens());
    assertEquals(s.expect("output_tokens").getAsInt(), reply.finished().getUsage().getOutputTokens());
    String reason = reply.finished().getFinishReason().name();
    assertEquals("FINISH_REASON_" + s.expect("finish_reason").getAsString(), reason);
  }

  @Test
  void cancel(Scenario s) {
    var client = s.client();
    try (var stream = client.stream(s.request().setRequestId(s.ownName()).build())) {
      stream.iterator().next();
      assertTrue(isListed(client, s.ownName()));
    }
    while (isListed(client, s.ownName())) {}
  }

  @Test
  void deadline(Scenario s) {
    var timeout = Duration.ofMillis(s.input("timeout_ms").getAsLong());
    var error = refusal(() -> read(s.client().stream(s.request().build(), timeout)));
    assertEquals(s.expect("code").getAsString(), error.code().name());
  }

  @Test
  void cancelledById(Scenario s) {
    var client = s.client();
    var pieces = client.stream(s.request().setRequestId(s.ownName()).build()).iterator();
    pieces.next();
    assertTrue(isListed(client, s.ownName()));
    RequestInfo ended = client.cancelRequest(s.ownName());
    assertEquals(s.ownName(), ended.getRequestId());
    assertEquals(s.expect("method").getAsString(), ended.getMethod());
    s.assertRefused(refusal(() -> pieces.forEachRemaining(piece -> {})));
  }

  @Test
  void invalidArgument(Scenario s) {
    var client = s.client();
    var wrong = s.request().build();
    for (Executable call : List.<Executable>of(() -> client.generate(wrong), () -> read(client.stream(wrong)))) {
      var error = refusal(call);
      s.assertRefused(error);
      assertEquals(Optional.of(s.expect("field").getAsString()), error.field());
      assertEquals(Optional.empty(), error.retryAfter());
    }
  }

  @Test
  void notFound(Scenario s) {
    var request = s.request().setModel(s.input("model").getAsString()).build();
    var error = refusal(() -> s.client().generate(request));
    s.assertRefused(error);
    assertEquals(servers.model, error.metadata().get(s.expect("metadata_key").getAsString()));
  }

  @Test
  void alreadyExists(Scenario s) {
    var client = s.client();
    var request = s.request().setRequestId(s.ownName()).build();
    try (var stream = client.stream(request)) {
      stream.iterator().next();
      s.assertRefused(refusal(() -> client.generate(request)));
    }
  }

  @Test
  void idOfTwoTenants(Scenario s) {
    var client = s.client();
    var request = s.request().setRequestId(s.ownName());
    var one = request.clone().setCache(CachePolicy.newBuilder().setTenant(s.ownName() + "-1")).build();
    var other =
        request
            .clone()
            .setCache(CachePolicy.newBuilder().setTenant(s.ownName() + "-2"))
            .setMaxOutputTokens(s.input("other_max_output_tokens").getAsInt())
            .build();
    try (var stream = client.stream(one)) {
      stream.iterator().next();
      GenerateResponse answer = client.generate(other);
      assertEquals(s.ownName(), answer.getRequestId());
      assertEquals(s.expect("output_tokens").getAsInt(), answer.getUsage().getOutputTokens());
    }
  }

  @Test
  void unauthenticated(Scenario s) throws IOException {
    var trusting = trusting();
    var request = s.request().build();
    var nobody = s.client(builder -> builder.credentials(trusting));
    s.assertRefused(refusal(() -> nobody.generate(request)), "missing_reason");
    String token = s.input("unknown_token").getAsString();
    var somebody = s.client(builder -> builder.credentials(trusting).token(token));
    s.assertRefused(refusal(() -> somebody.generate(request)), "unknown_reason");
  }

  @Test
  void permissionDenied(Scenario s) throws IOException {
    var trusting = trusting();
    var client = s.client(builder -> builder.credentials(trusting).token(servers.token));
    var another = CachePolicy.newBuilder().setTenant(s.input("tenant").getAsString());
    s.assertRefused(refusal(() -> client.generate(s.request().setCache(another).build())));
  }

  @Test
  void resourceExhausted(Scenario s) {
    var client = s.client();
    var request = s.request().setMaxOutputTokens(servers.tokensPerMinute).setCache(s.tenant()).build();
    client.generate(request);
    var error = refusal(() -> client.generate(request));
    s.assertRefused(error);
    Duration delay = error.retryAfter().orElseThrow();
    var limit = Duration.ofSeconds(s.expect("retry_after_limit_s").getAsLong());
    assertTrue(delay.compareTo(Duration.ZERO) > 0 && delay.compareTo(limit) <= 0, delay.toString());
  }

  @Test
  void unavailable(Scenario s) {
    s.assertRefused(refusal(() -> read(s.client().stream(s.request().build()))));
  }

  @Test
  void retryOnDrain(Scenario s) {
    var client = s.client();
    var request = s.request().build();
    assertEquals(s.expect("output_tokens").getAsInt(), client.generate(request).getUsage().getOutputTokens());
    s.assertRefused(refusal(() -> read(client.stream(request))));
  }

  @Test
  void retryLimit(Scenario s) {
    int limit = s.input("retry_limit").getAsInt();
    var request = s.request().setRequestId(s.ownName());
    var patient = s.client(builder -> builder.retryLimit(limit));
    var answer = patient.generate(request.build());
    assertEquals(s.expect("output_tokens").getAsInt(), answer.getUsage().getOutputTokens());
    s.assertRefused(refusal(() -> read(patient.stream(request.build()))));
    var hasty = s.client(builder -> builder.retryLimit(limit - 1));
    var error = refusal(() -> hasty.generate(request.setRequestId(s.ownName() + "-again").build()));
    s.assertRefused(error);
    assertTrue(error.retryAfter().isPresent());
  }

  @Test
  void toolsLoop(Scenario s) {
    var client = s.client();
    var facts = s.input("tool").getAsJsonObject();
    var tool =
        Tool.newBuilder()
            .setName(facts.get("name").getAsString())
            .setDescription(facts.get("description").getAsString())
            .setParametersJson(facts.get("parameters").toString())
            .build();
    var talk = new Conversation().setTools(tool).say(s.input("question").getAsString());
    var request = talk.request().setCache(s.tenant());

    GenerateResponse answer = client.generate(request.build());
    assertEquals(s.expect("text").getAsString(), answer.getText());
    assertEquals(s.expect("reasoning").getAsString(), answer.getReasoning());
    assertEquals("FINISH_REASON_" + s.expect("finish_reason").getAsString(), answer.getFinishReason().name());
    assertEquals(1, answer.getToolCallsCount());
    ToolCall call = answer.getToolCalls(0);
    assertEquals(tool.getName(), call.getName());
    assertEquals(s.expect("arguments"), JsonParser.parseString(call.getArgumentsJson()));

    TextStream stream = client.stream(request.build());
    assertEquals(answer.getText(), read(stream));
    Reply reply = stream.reply();
    assertEquals(answer.getReasoning(), reply.reasoning());
    assertEquals(answer.getTokenIdsList(), reply.tokenIds());
    assertEquals(List.of(call.getName()), reply.toolCalls().stream().map(ToolCall::getName).toList());
    assertEquals(call.getArgumentsJson(), reply.toolCalls().get(0).getArgumentsJson());

    talk.add(reply);
    reply.toolCalls().forEach(asked -> talk.answer(asked, s.input("result").getAsString()));
    var silent = ToolChoice.newBuilder().setMode(ToolChoiceMode.TOOL_CHOICE_MODE_NONE);
    var following = client.generate(request.setPrompt(talk.prompt()).setToolChoice(silent).build()).getUsage();
    int known = answer.getUsage().getPromptTokens() + answer.getUsage().getOutputTokens();
    assertTrue(following.getPromptTokens() > known);
    int limit = s.expect("uncached_known_tokens_limit").getAsInt();
    assertTrue(following.getCachedTokens() > known - limit, following.getCachedTokens() + " of " + known);
  }

  @Test
  void reasoningBudget(Scenario s) {
    var client = s.client();
    var talk = new Conversation().say(s.input("question").getAsString());
    var request =
        GenerateRequest.newBuilder()
            .setPrompt(talk.prompt())
            .setMaxOutputTokens(s.input("max_output_tokens").getAsInt());
    GenerateResponse answer = client.generate(request.build());
    assertEquals(s.expect("text").getAsString(), answer.getText());
    assertEquals(s.expect("reasoning").getAsString(), answer.getReasoning());
    assertEquals(s.expect("reasoning_tokens").getAsInt(), answer.getUsage().getReasoningTokens());
    request.setMaxReasoningTokens(s.input("max_reasoning_tokens").getAsInt());
    GenerateResponse closed = client.generate(request.build());
    assertTrue(closed.getText().startsWith(answer.getText()), closed.getText());
    assertEquals("", closed.getReasoning());
    assertEquals(s.expect("closed_reasoning_tokens").getAsInt(), closed.getUsage().getReasoningTokens());
  }

  @Test
  void infill(Scenario s) {
    var client = s.client();
    var gap =
        InfillPrompt.newBuilder()
            .setPrefix(s.input("prefix").getAsString())
            .setSuffix(s.input("suffix").getAsString());
    var prompt = Prompt.newBuilder().setInfill(gap);
    int limit = s.input("max_output_tokens").getAsInt();
    GenerateResponse answer =
        client.generate(GenerateRequest.newBuilder().setPrompt(prompt).setMaxOutputTokens(limit).build());
    assertEquals(s.expect("text").getAsString(), answer.getText());
    assertEquals("FINISH_REASON_" + s.expect("finish_reason").getAsString(), answer.getFinishReason().name());
    assertEquals(answer.getTokenIds(answer.getTokenIdsCount() - 1), answer.getStopTokenId());
    var tokens = client.tokenize(TokenizeRequest.newBuilder().setPrompt(prompt).build());
    assertEquals(answer.getUsage().getPromptTokens(), tokens.getTokenCount());
  }

  /** What the output of structuredOutput is read into. */
  private record City(String city, int inhabitants) {}

  @Test
  void structuredOutput(Scenario s) {
    var format = ResponseFormat.newBuilder().setJsonSchema(s.input("schema").toString()).setCompact(true);
    var request = s.request().setResponseFormat(format).build();
    var client = s.client();
    assertEquals(s.expect("text").getAsString(), client.generate(request).getText());
    var expected = new City(s.expect("city").getAsString(), s.expect("inhabitants").getAsInt());
    assertEquals(expected, client.generateJson(request, City.class));
    assertEquals(expected, client.async().generateJson(request, City.class).join());
  }

  @Test
  void unicode(Scenario s) {
    var client = s.client();
    var choice = ChoiceFormat.newBuilder().addTexts(s.input("choice").getAsString());
    var request = s.request().setResponseFormat(ResponseFormat.newBuilder().setChoice(choice)).build();
    String text = s.expect("text").getAsString();
    assertEquals(text, client.generate(request).getText());
    var pieces = new ArrayList<String>();
    client.stream(request).forEach(pieces::add);
    assertEquals(text, String.join("", pieces));
    assertTrue(pieces.size() > 1);
    for (String piece : pieces) {
      // Half of a surrogate pair cannot be encoded.
      assertTrue(StandardCharsets.UTF_8.newEncoder().canEncode(piece) && !piece.contains("\uFFFD"), piece);
    }
    var tokens = client.tokenize(TokenizeRequest.newBuilder().setPrompt(s.prompt()).build()).getTokensList();
    assertEquals(s.text(), client.detokenize(tokens.stream().map(Token::getId).toList()));
  }

  @Test
  void hundredStreams(Scenario s) throws Exception {
    var client = s.client();
    var request = s.request().build();
    String text = client.generate(request).getText();
    Callable<Reply> read =
        () -> {
          var stream = client.stream(request);
          read(stream);
          return stream.reply();
        };
    int count = s.input("stream_count").getAsInt();
    var threads = Executors.newFixedThreadPool(count);
    try {
      for (Future<Reply> reply : threads.invokeAll(Collections.nCopies(count, read))) {
        assertEquals(text, reply.get().text());
        assertEquals(s.expect("output_tokens").getAsInt(), reply.get().finished().getUsage().getOutputTokens());
      }
    } finally {
      threads.shutdownNow();
    }
  }

  @Test
  void embed(Scenario s) {
    var request = EmbedRequest.newBuilder().setDimensions(s.input("dimensions").getAsInt());
    for (JsonElement text : s.input("texts").getAsJsonArray()) {
      request.addInputs(EmbedInput.newBuilder().setText(text.getAsString()));
    }
    var answer = s.client().embed(request.build());
    List<Embedding> found = answer.getEmbeddingsList();
    var sizes = Collections.nCopies(s.expect("vector_count").getAsInt(), s.expect("vector_size").getAsInt());
    assertEquals(sizes, found.stream().map(Embedding::getValuesCount).toList());
    assertTrue(answer.getPromptTokens() > 0);
    assertEquals(found.stream().mapToInt(Embedding::getPromptTokens).sum(), answer.getPromptTokens());
  }

  @Test
  void rerank(Scenario s) {
    var request =
        RerankRequest.newBuilder()
            .setQuery(s.input("query").getAsString())
            .setText(s.input("template").getAsString())
            .setPositiveAnswer(s.input("positive_answer").getAsString())
            .setNegativeAnswer(s.input("negative_answer").getAsString());
    s.input("documents").getAsJsonArray().forEach(text -> request.addDocuments(text.getAsString()));
    var answer = s.client().rerank(request.build());
    List<RerankResult> ranked = answer.getResultsList();
    assertEquals(integers(s.expect("indexes")), ranked.stream().map(RerankResult::getIndex).sorted().toList());
    assertEquals(ranked.stream().sorted(Comparator.comparing(RerankResult::getScore).reversed()).toList(), ranked);
    assertTrue(answer.getPromptTokens() > 0);
  }

  @Test
  void getServer(Scenario s) {
    var client = s.client();
    client.waitReady(Duration.ofMinutes(1));
    Server server = client.getServer();
    assertFalse(server.getVersion().isEmpty());
    assertTrue(server.getLimits().getMaxOutputTokens() > 0);
    assertEquals("SERVER_STATE_" + s.expect("state").getAsString(), server.getState().name());
    var features = server.getFeaturesList().stream().map(Enum::name).toList();
    assertTrue(features.contains("SERVER_FEATURE_" + s.expect("feature").getAsString()), features.toString());
  }

  @Test
  void tokenRefresh(Scenario s) throws IOException {
    var trusting = trusting();
    var request = s.request().build();
    String unknown = s.input("unknown_token").getAsString();
    int outputTokens = s.expect("output_tokens").getAsInt();
    int count = s.expect("source_call_count").getAsInt();

    var source = new Source(unknown, servers.token);
    var client = s.client(builder -> builder.credentials(trusting).tokenSource(source));
    for (int turn = 0; turn < 2; turn++) {
      assertEquals(outputTokens, client.generate(request).getUsage().getOutputTokens());
      assertEquals(count, source.count.get());
    }
    var another = new Source(unknown, servers.token);
    var streaming = s.client(builder -> builder.credentials(trusting).tokenSource(another)).stream(request);
    read(streaming);
    assertEquals(outputTokens, streaming.reply().tokenIds().size());
    assertEquals(count, another.count.get());
    var wrong = new Source(unknown);
    var stranger = s.client(builder -> builder.credentials(trusting).tokenSource(wrong));
    s.assertRefused(refusal(() -> stranger.generate(request)));
    assertEquals(count, wrong.count.get());
  }

  /** Gives one token after another, the last one for ever. */
  private static final class Source implements Supplier<String> {
    private final List<String> tokens;
    private final AtomicInteger count = new AtomicInteger();

    private Source(String... tokens) {
      this.tokens = List.of(tokens);
    }

    @Override
    public String get() {
      return tokens.get(Math.min(count.getAndIncrement(), tokens.size() - 1));
    }
  }

  @Test
  void callMetadata(Scenario s) throws IOException {
    var trusting = trusting();
    var client = s.client(builder -> builder.credentials(trusting));
    var metadata = new Metadata();
    var name = Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);
    metadata.put(name, "Bearer " + servers.token);
    var known = client.withMetadata(metadata);
    var request = s.request().build();
    assertEquals(s.expect("output_tokens").getAsInt(), known.generate(request).getUsage().getOutputTokens());
    read(known.stream(request));
    s.assertRefused(refusal(() -> client.generate(request)));
  }

  @Test
  void tlsAndToken(Scenario s) throws IOException {
    var trusting = trusting();
    var known = s.client(builder -> builder.credentials(trusting).token(servers.token));
    var request = s.request().build();
    assertEquals(s.expect("output_tokens").getAsInt(), known.generate(request).getUsage().getOutputTokens());
    var distrustful = s.client(builder -> builder.credentials(TlsChannelCredentials.create()).token(servers.token));
    var error = refusal(() -> read(distrustful.stream(request)));
    assertEquals(s.expect("untrusted_code").getAsString(), error.code().name());
  }

  private static IcehouseException refusal(Executable call) {
    return assertThrows(IcehouseException.class, call);
  }

  private static String read(TextStream stream) {
    return String.join("", stream);
  }

  private static boolean isListed(IcehouseClient client, String requestId) {
    return client.listRequests().stream().anyMatch(listed -> listed.getRequestId().equals(requestId));
  }

  /** Knows the secured server's authority. */
  private ChannelCredentials trusting() throws IOException {
    return TlsChannelCredentials.newBuilder().trustManager(new File(servers.caPath)).build();
  }

  private static List<Integer> integers(JsonElement numbers) {
    return numbers.getAsJsonArray().asList().stream().map(JsonElement::getAsInt).toList();
  }
}
