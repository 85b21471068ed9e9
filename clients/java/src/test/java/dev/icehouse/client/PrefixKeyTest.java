package dev.icehouse.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonParser;
import com.google.protobuf.util.JsonFormat;
import dev.icehouse.v1.GenerateRequest;
import java.nio.file.Files;
import java.nio.file.Path;
import org.junit.jupiter.api.Test;

class PrefixKeyTest {
  @Test
  void theKeysOfTheExamplesAreThoseOfAllClientLibraries() throws Exception {
    JsonArray examples = JsonParser.parseString(Files.readString(Path.of("../prefix_keys.json"))).getAsJsonArray();
    assertFalse(examples.isEmpty());
    for (JsonElement example : examples) {
      GenerateRequest.Builder request = GenerateRequest.newBuilder();
      JsonFormat.parser().merge(example.getAsJsonObject().get("request").toString(), request);
      assertEquals(example.getAsJsonObject().get("key").getAsString(), PrefixKey.of(request.build()));
    }
  }
}
