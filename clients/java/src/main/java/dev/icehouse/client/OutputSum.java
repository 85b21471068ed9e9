package dev.icehouse.client;

import dev.icehouse.v1.Delta;
import dev.icehouse.v1.Finished;
import dev.icehouse.v1.MalformedToolCall;
import dev.icehouse.v1.ToolCall;
import dev.icehouse.v1.ToolCallDelta;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;
import java.util.TreeMap;

/** Adds up one completion of a stream. */
final class OutputSum {
  private final StringBuilder text = new StringBuilder();
  private final StringBuilder reasoning = new StringBuilder();
  private final List<Integer> tokenIds = new ArrayList<>();
  private final TreeMap<Integer, ToolCall.Builder> toolCalls = new TreeMap<>();
  private final List<MalformedToolCall> malformedToolCalls = new ArrayList<>();
  private Finished finished;

  void add(Delta delta) {
    text.append(delta.getText());
    reasoning.append(delta.getReasoning());
    tokenIds.addAll(delta.getTokenIdsList());
    if (delta.hasToolCall()) {
      add(delta.getToolCall());
    }
    if (delta.hasMalformedToolCall()) {
      malformedToolCalls.add(delta.getMalformedToolCall());
    }
  }

  private void add(ToolCallDelta piece) {
    if (piece.getWithdrawn()) {
      toolCalls.remove(piece.getIndex());
      return;
    }
    ToolCall.Builder call =
        toolCalls.computeIfAbsent(
            piece.getIndex(), index -> ToolCall.newBuilder().setId(piece.getId()).setName(piece.getName()));
    call.setArgumentsJson(call.getArgumentsJson() + piece.getArgumentsJson());
    call.setRepaired(call.getRepaired() || piece.getRepaired());
  }

  void finish(Finished finished) {
    this.finished = finished;
  }

  /** The output; empty before its end. */
  Optional<Output> output() {
    return Optional.ofNullable(finished)
        .map(
            end ->
                new Output(
                    text.toString(),
                    reasoning.toString(),
                    List.copyOf(tokenIds),
                    toolCalls.values().stream().map(ToolCall.Builder::build).toList(),
                    List.copyOf(malformedToolCalls),
                    end));
  }
}
