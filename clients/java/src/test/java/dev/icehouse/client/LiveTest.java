package dev.icehouse.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.icehouse.v1.CacheServiceGrpc;
import dev.icehouse.v1.ChatMessage;
import dev.icehouse.v1.ChatPrompt;
import dev.icehouse.v1.EvictAllRequest;
import dev.icehouse.v1.ExplainRequest;
import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.GetModelRequest;
import dev.icehouse.v1.Model;
import dev.icehouse.v1.ModelServiceGrpc;
import dev.icehouse.v1.Prompt;
import dev.icehouse.v1.Role;
import dev.icehouse.v1.SamplingParams;
import dev.icehouse.v1.TokenPrompt;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.util.List;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;

/** Against real servers; `make test-clients` starts them. */
@EnabledIfEnvironmentVariable(named = Servers.VARIABLE, matches = ".+")
class LiveTest {
  private static final GenerateRequest ENDLESS =
      GenerateRequest.newBuilder().setPrompt(text("Once")).setMaxOutputTokens(4000).build();

  private final Servers servers = Servers.told();

  private static Prompt.Builder text(String text) {
    return Prompt.newBuilder().setText(text);
  }

  @Test
  void ofSeveralCompletionsTheFirstIsTheReply() {
    var sampling = SamplingParams.newBuilder().setTemperature(1).setSeed(7);
    var request =
        GenerateRequest.newBuilder()
            .setPrompt(text("Once"))
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
    var user = ChatMessage.newBuilder().setRole(Role.ROLE_USER).setContent("Hi");
    try (var client = IcehouseClient.connect(servers.address)) {
      for (Prompt.Builder prompt :
          List.of(
              text("Hi"),
              Prompt.newBuilder().setTokens(TokenPrompt.newBuilder().addIds(10).addIds(11)),
              Prompt.newBuilder().setChat(ChatPrompt.newBuilder().addMessages(user)))) {
        var request = GenerateRequest.newBuilder().setPrompt(prompt).setMaxOutputTokens(1);
        var response = client.generate(request.build());
        assertEquals(1, response.getUsage().getOutputTokens());
      }
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
  void theOtherServicesAreThereToo() {
    try (var client = IcehouseClient.connect(servers.address)) {
      assertEquals(List.of(servers.model), client.listModels().stream().map(Model::getId).toList());
      assertTrue(client.cacheStats().getCache().hasRam());
      assertTrue(client.getStats().hasEngine());
      var models = ModelServiceGrpc.newBlockingStub(client.channel());
      var cache = CacheServiceGrpc.newBlockingStub(client.channel());
      cache.explain(ExplainRequest.newBuilder().setPrompt(text("Hi")).build());
      var none = GetModelRequest.newBuilder().setModel("none").build();
      var failure = assertThrows(StatusRuntimeException.class, () -> models.getModel(none));
      assertEquals("MODEL_NOT_FOUND", new IcehouseException(failure).reason());
      var noModel = EvictAllRequest.newBuilder().setModel("none").build();
      var refused = assertThrows(IcehouseException.class, () -> client.cache().evictAll(noModel));
      assertEquals("MODEL_NOT_FOUND", refused.reason());
    }
  }
}
