package dev.icehouse.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assumptions.assumeFalse;

import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import dev.icehouse.v1.CachePolicy;
import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.Prompt;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.Optional;
import java.util.function.UnaryOperator;
import org.junit.jupiter.api.extension.AfterEachCallback;
import org.junit.jupiter.api.extension.ExtensionContext;
import org.junit.jupiter.api.extension.ParameterContext;
import org.junit.jupiter.api.extension.ParameterResolver;
import org.opentest4j.TestAbortedException;

/** One entry of clients/scenarios.json, its server, and a name that no other test has; see clients/README.md. */
final class Scenario implements AutoCloseable {
  private final String name;
  private final JsonObject entry;
  private final List<IcehouseClient> clients = new ArrayList<>();

  private Scenario(String name, JsonObject entry) {
    this.name = name;
    this.entry = entry;
  }

  private static Scenario named(String name) {
    try {
      var entries = JsonParser.parseString(Files.readString(Path.of("../scenarios.json"))).getAsJsonObject();
      assertNotNull(entries.get(name), () -> "there is no scenario " + name);
      return new Scenario(name, entries.getAsJsonObject(name));
    } catch (IOException error) {
      throw new AssertionError("the scenarios cannot be read", error);
    }
  }

  /** What is sent. */
  JsonElement input(String key) {
    return value("input", key);
  }

  /** What must be true of the answer. */
  JsonElement expect(String key) {
    return value("expect", key);
  }

  private JsonElement value(String part, String key) {
    var value = entry.getAsJsonObject(part).get(key);
    assertNotNull(value, () -> name + " has no " + part + " " + key);
    return value;
  }

  /** A name for a request or a tenant. */
  String ownName() {
    return "java-" + name + "-" + ProcessHandle.current().pid();
  }

  /** A tenant whose cache is empty. */
  CachePolicy tenant() {
    return CachePolicy.newBuilder().setTenant(ownName()).build();
  }

  String text() {
    if (entry.getAsJsonObject("input").has("text")) {
      return input("text").getAsString();
    }
    return input("text_unit").getAsString().repeat(input("repeat").getAsInt());
  }

  Prompt prompt() {
    return Prompt.newBuilder().setText(text()).build();
  }

  /** A request to generate from the prompt. */
  GenerateRequest.Builder request() {
    var request = GenerateRequest.newBuilder().setPrompt(prompt());
    if (entry.getAsJsonObject("input").has("max_output_tokens")) {
      request.setMaxOutputTokens(input("max_output_tokens").getAsInt());
    }
    return request;
  }

  /** Returns a client of the scenario's server, which ends with the test. */
  IcehouseClient client() {
    return client(builder -> builder);
  }

  /** As {@link #client()}, with more to say about the connection. */
  IcehouseClient client(UnaryOperator<IcehouseClient.Builder> options) {
    String address = Servers.address(entry.get("server").getAsString());
    assumeFalse(address.isEmpty(), "its server could not be started; `make test-clients` says why");
    var client = options.apply(IcehouseClient.to(address)).build();
    clients.add(client);
    return client;
  }

  /** Compares what a call was refused with. */
  void assertRefused(IcehouseException error) {
    assertRefused(error, "reason");
  }

  /** As {@link #assertRefused(IcehouseException)}, where the reason has a key of its own. */
  void assertRefused(IcehouseException error, String reasonKey) {
    assertEquals(expect("code").getAsString(), error.code().name());
    assertEquals(expect(reasonKey).getAsString(), error.reason());
  }

  @Override
  public void close() {
    clients.forEach(IcehouseClient::close);
  }

  /** Gives each test the scenario of its name, and writes down what it came to. */
  static final class Runner implements ParameterResolver, AfterEachCallback {
    @Override
    public boolean supportsParameter(ParameterContext parameter, ExtensionContext test) {
      return parameter.getParameter().getType() == Scenario.class;
    }

    @Override
    public Scenario resolveParameter(ParameterContext parameter, ExtensionContext test) {
      var scenario = named(nameOf(test));
      // What is in the store is closed after the test.
      test.getStore(ExtensionContext.Namespace.create(Runner.class)).put(Scenario.class, scenario);
      return scenario;
    }

    @Override
    public void afterEach(ExtensionContext test) throws IOException {
      String path = System.getenv("ICEHOUSE_TEST_RESULTS");
      Optional<Throwable> end = test.getExecutionException();
      if (path == null || end.filter(TestAbortedException.class::isInstance).isPresent()) {
        return;
      }
      var line = new JsonObject();
      line.addProperty("scenario", nameOf(test));
      line.addProperty("passed", end.isEmpty());
      Files.writeString(Path.of(path), line + "\n", StandardOpenOption.CREATE, StandardOpenOption.APPEND);
    }

    private static String nameOf(ExtensionContext test) {
      String method = test.getRequiredTestMethod().getName();
      return method.replaceAll("([A-Z])", "_$1").toLowerCase(Locale.ROOT);
    }
  }
}
