package dev.icehouse.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import com.google.gson.JsonParser;
import dev.icehouse.v1.FinishReason;
import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.GenerateResponse;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import org.junit.jupiter.api.Test;

/** The schema of a record, and outputs read into it. */
class JsonOutputTest {
  private enum Coast {
    WEST,
    EAST
  }

  private record Place(String name, Coast coast) {}

  private record Trip(
      Place from, List<Place> stops, long steps, double km, boolean done, int[] days, Map<String, Integer> costs) {}

  private static GenerateResponse response(String text, FinishReason reason) {
    return GenerateResponse.newBuilder().setText(text).setFinishReason(reason).build();
  }

  @Test
  void aRecordHasASchemaInTheOrderOfItsComponents() {
    String place =
        """
        {"type": "object", "properties": {"name": {"type": "string"}, "coast": {"enum": ["WEST", "EAST"]}},
         "required": ["name", "coast"], "additionalProperties": false}""";
    String trip =
        """
        {"type": "object", "properties": {"from": %s, "stops": {"type": "array", "items": %s},
         "steps": {"type": "integer"}, "km": {"type": "number"}, "done": {"type": "boolean"},
         "days": {"type": "array", "items": {"type": "integer"}},
         "costs": {"type": "object", "additionalProperties": {"type": "integer"}}},
         "required": ["from", "stops", "steps", "km", "done", "days", "costs"], "additionalProperties": false}"""
            .formatted(place, place);
    assertEquals(JsonParser.parseString(trip).toString(), JsonOutput.of(Trip.class).schema());
    assertEquals(JsonOutput.of(Trip.class).schema(), JsonOutput.of(Trip.class).format().getJsonSchema());
  }

  @Test
  void anOutputIsReadIntoTheRecord() {
    var text = "{\"name\": \"Bergen\", \"coast\": \"WEST\"}";
    var whole = response(text, FinishReason.FINISH_REASON_STOP_TOKEN);
    assertEquals(new Place("Bergen", Coast.WEST), JsonOutput.of(Place.class).read(whole));
  }

  @Test
  void anOutputThatALimitCutIsRefused() {
    var cut = response("{\"name\": \"Ber", FinishReason.FINISH_REASON_LENGTH);
    assertThrows(IllegalStateException.class, () -> JsonOutput.of(Place.class).read(cut));
  }

  @Test
  void aFormatOfTheRequestsOwnIsLeftAlone() {
    var output = JsonOutput.of(Place.class);
    var asked = output.asked(GenerateRequest.newBuilder().setMaxOutputTokens(9).build());
    assertEquals(output.format(), asked.getResponseFormat());
    var own = asked.toBuilder();
    own.getResponseFormatBuilder().setCompact(true);
    assertEquals(own.build(), output.asked(own.build()));
  }

  @Test
  void aTypeWithoutASchemaIsRefused() {
    assertThrows(IllegalArgumentException.class, () -> JsonOutput.of(Object.class).schema());
    assertThrows(IllegalArgumentException.class, () -> JsonOutput.of(Wish.class).schema());
  }

  private record Wish(Optional<String> text) {}
}
