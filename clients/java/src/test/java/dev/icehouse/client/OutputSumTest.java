package dev.icehouse.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.icehouse.v1.Delta;
import dev.icehouse.v1.FinishReason;
import dev.icehouse.v1.Finished;
import dev.icehouse.v1.MalformedToolCall;
import dev.icehouse.v1.ToolCall;
import dev.icehouse.v1.ToolCallDelta;
import java.util.List;
import org.junit.jupiter.api.Test;

/** An answer is added up from its pieces. */
class OutputSumTest {
  private static Delta call(ToolCallDelta.Builder piece) {
    return Delta.newBuilder().setToolCall(piece).build();
  }

  @Test
  void callsAndReasoningAreAddedUpTooAndWhatIsWithdrawnIsLeftOut() {
    var sum = new OutputSum();
    sum.add(Delta.newBuilder().setReasoning("hm").addTokenIds(1).build());
    sum.add(Delta.newBuilder().setText("Let me ").addTokenIds(2).build());
    sum.add(call(ToolCallDelta.newBuilder().setId("c1").setName("weather").setArgumentsJson("{\"city\": ")));
    sum.add(call(ToolCallDelta.newBuilder().setIndex(1).setId("c2").setName("tides")));
    sum.add(call(ToolCallDelta.newBuilder().setArgumentsJson("\"Oslo\"}").setRepaired(true)));
    sum.add(call(ToolCallDelta.newBuilder().setIndex(1).setWithdrawn(true)));
    var malformed = MalformedToolCall.newBuilder().setText("see").setProblem("no JSON").build();
    sum.add(Delta.newBuilder().setText("see").setMalformedToolCall(malformed).build());
    assertTrue(sum.output().isEmpty());
    var finished = Finished.newBuilder().setFinishReason(FinishReason.FINISH_REASON_TOOL_CALLS).build();
    sum.finish(finished);
    var weather = ToolCall.newBuilder().setId("c1").setName("weather").setRepaired(true);
    weather.setArgumentsJson("{\"city\": \"Oslo\"}");
    var wanted =
        new Output("Let me see", "hm", List.of(1, 2), List.of(weather.build()), List.of(malformed), finished);
    assertEquals(wanted, sum.output().orElseThrow());
  }
}
