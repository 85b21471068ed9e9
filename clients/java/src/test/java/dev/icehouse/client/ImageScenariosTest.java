package dev.icehouse.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.GenerateResponse;
import dev.icehouse.v1.Usage;
import java.util.Base64;
import java.util.List;
import java.util.Optional;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;
import org.junit.jupiter.api.extension.ExtendWith;

/** Each scenario of clients/scenarios.json about images; `make test-clients` starts the servers. */
@EnabledIfEnvironmentVariable(named = Servers.VARIABLE, matches = ".+")
@ExtendWith(Scenario.Runner.class)
@Timeout(120)
class ImageScenariosTest {
  @Test
  void images(Scenario s) {
    var client = s.client();
    List<GenerateResponse> answers =
        Stream.of("image", "image", "other_image").map(image -> client.generate(shown(s, image))).toList();
    for (GenerateResponse answer : answers) {
      assertEquals(s.expect("image_tokens").getAsInt(), answer.getUsage().getImageTokens());
    }
    assertEquals(s.expect("first_cached_tokens").getAsInt(), answers.get(0).getUsage().getCachedTokens());
    assertEquals(answers.get(0).getTokenIdsList(), answers.get(1).getTokenIdsList());
    Usage again = answers.get(1).getUsage();
    int missing = again.getPromptTokens() - again.getRamTokens();
    assertTrue(missing <= s.expect("uncached_tokens_limit").getAsInt(), again::toString);
    Usage other = answers.get(2).getUsage();
    assertTrue(other.getCachedTokens() < s.expect("other_cached_tokens_limit").getAsInt(), other::toString);
  }

  @Test
  void brokenImage(Scenario s) {
    refusal(s);
  }

  @Test
  void imagesUnsupported(Scenario s) {
    var error = refusal(s);
    assertTrue(error.getMessage().contains(s.expect("message_part").getAsString()), error.getMessage());
    assertTrue(error.metadata().containsKey(s.expect("metadata_key").getAsString()), error.metadata()::toString);
  }

  private static IcehouseException refusal(Scenario s) {
    var error = assertThrows(IcehouseException.class, () -> s.client().generate(shown(s, "image")));
    s.assertRefused(error);
    assertEquals(Optional.of(s.expect("field").getAsString()), error.field());
    return error;
  }

  private static GenerateRequest shown(Scenario s, String image) {
    byte[] data = Base64.getDecoder().decode(s.input(image).getAsString());
    var talk = new Conversation();
    talk.say(s.input("question").getAsString(), Images.of(data, s.input("media_type").getAsString()));
    return GenerateRequest.newBuilder()
        .setPrompt(talk.prompt())
        .setMaxOutputTokens(s.input("max_output_tokens").getAsInt())
        .setCache(s.tenant())
        .build();
  }
}
