package dev.icehouse.client;

import com.google.gson.Gson;
import com.google.gson.reflect.TypeToken;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.util.Map;

/**
 * The published service config: Generate, Embed and Rerank are retried while no server is available, and servers whose
 * health check says that they do not serve are not used.
 */
final class ServiceConfig {
  private ServiceConfig() {}

  /** Returns it as gRPC's channels take it. */
  static Map<String, Object> published() {
    try (InputStream content = ServiceConfig.class.getResourceAsStream("service_config.json")) {
      var reader = new InputStreamReader(content, StandardCharsets.UTF_8);
      return new Gson().fromJson(reader, new TypeToken<Map<String, Object>>() {}.getType());
    } catch (IOException error) {
      throw new UncheckedIOException("the service config in this package cannot be read", error);
    }
  }
}
