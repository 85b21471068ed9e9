package dev.icehouse.client;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParseException;
import com.google.gson.JsonParser;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.util.JsonFormat;
import dev.icehouse.v1.ChatMessage;
import dev.icehouse.v1.ChatPrompt;
import dev.icehouse.v1.ContentPart;
import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.GenerateResponse;
import dev.icehouse.v1.ImagePart;
import dev.icehouse.v1.Tool;
import dev.icehouse.v1.ToolCall;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.UUID;

/**
 * The turns so far, each answer with its tokens, reasoning and tool calls, so that each turn starts from the
 * cached blocks of the one before. Not safe for use from several threads.
 */
public final class Conversation {
  private static final String KIND = "icehouse-conversation";
  private static final int VERSION = 1;

  private final List<ChatMessage> messages;
  private final String sessionId;
  private List<Tool> tools = List.of();

  /** Begins one without a system prompt. */
  public Conversation() {
    this(List.of(), UUID.randomUUID().toString().replace("-", ""));
  }

  /** Goes on with these turns, under a name for gateways, logs and traces. */
  public Conversation(List<ChatMessage> messages, String sessionId) {
    this.messages = new ArrayList<>(messages);
    this.sessionId = sessionId;
  }

  /** Names it to gateways, logs and traces, as the session id of a request. */
  public String sessionId() {
    return sessionId;
  }

  /** The turns, oldest first. */
  public List<ChatMessage> messages() {
    return Collections.unmodifiableList(messages);
  }

  /** The turns as a request takes them. */
  public ChatPrompt prompt() {
    return ChatPrompt.newBuilder().addAllMessages(messages).build();
  }

  /** A request for the next answer, with the turns, the tools and the session id. */
  public GenerateRequest.Builder request() {
    return GenerateRequest.newBuilder().setChat(prompt()).addAllTools(tools).setSessionId(sessionId);
  }

  /** What the model may ask for. */
  public List<Tool> tools() {
    return tools;
  }

  /**
   * Exchanges what the model may ask for. Tools stand before the turns, so other ones mean that nothing is reused. They
   * are not kept by {@link #toJson}.
   */
  public Conversation setTools(Tool... tools) {
    this.tools = List.of(tools);
    return this;
  }

  /** The system prompt, empty for none. */
  public String system() {
    return hasSystem() ? messages.get(0).getContent() : "";
  }

  /** Exchanges the system prompt, empty for none; nothing behind it is reused. */
  public Conversation setSystem(String text) {
    if (hasSystem()) {
      messages.remove(0);
    }
    if (!text.isEmpty()) {
      messages.add(0, turn("system", text).build());
    }
    return this;
  }

  /** Adds the user's turn; images, such as {@link Images} makes, stand before its text. */
  public Conversation say(String text, ImagePart... images) {
    if (images.length == 0) {
      messages.add(turn("user", text).build());
      return this;
    }
    var turn = turn("user", "");
    for (ImagePart image : images) {
      turn.addParts(ContentPart.newBuilder().setImage(image));
    }
    if (!text.isEmpty()) {
      turn.addParts(ContentPart.newBuilder().setText(text));
    }
    messages.add(turn.build());
    return this;
  }

  /** Adds the assistant's turn, an answer as it came. */
  public Conversation add(GenerateResponse answer) {
    return add(answer.getText(), answer.getReasoning(), answer.getToolCallsList(), answer.getTokenIdsList());
  }

  /** As {@link #add(GenerateResponse)}, of a stream. */
  public Conversation add(Reply answer) {
    return add(answer.text(), answer.reasoning(), answer.toolCalls(), answer.tokenIds());
  }

  /** Adds the result of a call that the assistant asked for. */
  public Conversation answer(ToolCall call, String content) {
    messages.add(turn("tool", content).setName(call.getName()).setToolCallId(call.getId()).build());
    return this;
  }

  /** Takes back the last turn of the user and all that came after it; nothing where there is none. */
  public void undo() {
    for (int index = messages.size() - 1; index >= 0; index--) {
      if (messages.get(index).getRole().equals("user")) {
        messages.subList(index, messages.size()).clear();
        return;
      }
    }
  }

  /** Returns it as text, to be kept; clients of every language read it. */
  public String toJson() {
    var listed = new JsonArray();
    for (ChatMessage message : messages) {
      listed.add(facts(message));
    }
    var kept = new JsonObject();
    kept.addProperty("kind", KIND);
    kept.addProperty("version", VERSION);
    kept.addProperty("session_id", sessionId);
    kept.add("messages", listed);
    return kept.toString();
  }

  /**
   * Returns the conversation in a text that was kept, or in a plain list of {"role", "content"}; throws
   * IllegalArgumentException.
   */
  public static Conversation fromJson(String text) {
    JsonElement facts;
    try {
      facts = JsonParser.parseString(text);
    } catch (JsonParseException error) {
      throw new IllegalArgumentException("no conversation: " + error.getMessage(), error);
    }
    if (facts.isJsonArray()) {
      return new Conversation(messagesOf(facts), new Conversation().sessionId);
    }
    JsonObject kept = facts.isJsonObject() ? facts.getAsJsonObject() : new JsonObject();
    JsonElement kind = kept.get("kind");
    JsonElement version = kept.get("version");
    if (!String.valueOf(kind).equals("\"" + KIND + "\"") || !String.valueOf(version).equals("" + VERSION)) {
      throw new IllegalArgumentException("no conversation: it is of kind " + kind + ", version " + version);
    }
    JsonElement named = kept.get("session_id");
    boolean isNamed = named != null && named.isJsonPrimitive() && !named.getAsString().isEmpty();
    String sessionId = isNamed ? named.getAsString() : new Conversation().sessionId;
    return new Conversation(messagesOf(kept.get("messages")), sessionId);
  }

  private Conversation add(String text, String reasoning, List<ToolCall> toolCalls, List<Integer> tokenIds) {
    ChatMessage.Builder turn = turn("assistant", text).setReasoning(reasoning);
    messages.add(turn.addAllToolCalls(toolCalls).addAllTokenIds(tokenIds).build());
    return this;
  }

  private boolean hasSystem() {
    return !messages.isEmpty() && messages.get(0).getRole().equals("system");
  }

  private static ChatMessage.Builder turn(String role, String text) {
    return ChatMessage.newBuilder().setRole(role).setContent(text);
  }

  private static JsonObject facts(ChatMessage message) {
    try {
      String text = JsonFormat.printer().preservingProtoFieldNames().print(message);
      JsonObject facts = JsonParser.parseString(text).getAsJsonObject();
      if (!facts.has("content")) {
        facts.addProperty("content", "");
      }
      return facts;
    } catch (InvalidProtocolBufferException error) {
      throw new AssertionError("a message of known fields can be written", error);
    }
  }

  private static List<ChatMessage> messagesOf(JsonElement facts) {
    if (facts == null || !facts.isJsonArray()) {
      throw new IllegalArgumentException("no conversation: there is no list of messages");
    }
    var messages = new ArrayList<ChatMessage>();
    for (JsonElement each : facts.getAsJsonArray()) {
      String place = "no conversation: messages[" + messages.size() + "]";
      var message = ChatMessage.newBuilder();
      try {
        JsonFormat.parser().merge(each.toString(), message);
      } catch (InvalidProtocolBufferException error) {
        throw new IllegalArgumentException(place + ": " + error.getMessage(), error);
      }
      if (message.getRole().isEmpty()) {
        throw new IllegalArgumentException(place + " has no role");
      }
      messages.add(message.build());
    }
    return messages;
  }
}
