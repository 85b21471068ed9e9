package dev.icehouse.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.protobuf.Message;
import com.google.protobuf.util.JsonFormat;
import java.nio.file.Files;
import java.nio.file.Path;
import org.junit.jupiter.api.Test;

class PrefixKeyTest {
  @Test
  void theKeysOfTheExamplesAreThoseOfAllClientLibraries() throws Exception {
    JsonArray examples = JsonParser.parseString(Files.readString(Path.of("../prefix_keys.json"))).getAsJsonArray();
    assertFalse(examples.isEmpty());
    for (JsonElement example : examples) {
      JsonObject fields = example.getAsJsonObject();
      String name = fields.get("message").getAsString();
      Message.Builder request =
          (Message.Builder) Class.forName("dev.icehouse.v1." + name).getMethod("newBuilder").invoke(null);
      JsonFormat.parser().merge(fields.get("request").toString(), request);
      assertEquals(fields.get("key").getAsString(), PrefixKey.of(request.build()).orElse(""), name);
    }
  }
}
