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
import dev.icehouse.v1.Prompt;
import dev.icehouse.v1.Role;
import dev.icehouse.v1.Tool;
import dev.icehouse.v1.ToolCall;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.UUID;

/**
 * The turns so far. It keeps each answer's tokens, reasoning and tool calls, so each turn starts from the cached blocks
 * of the turn before. Not safe for use from several threads.
 */
public final class Conversation {
  private static final String KIND = "icehouse-conversation";
  private static final int VERSION = 1;

  private final List<ChatMessage> messages;
  private final String sessionId;
  private List<Tool> tools = List.of();

  /** An empty conversation. */
  public Conversation() {
    this(List.of(), UUID.randomUUID().toString().replace("-", ""));
  }

  /** A conversation that continues these turns, with a name for logs, traces and gateways. */
  public Conversation(List<ChatMessage> messages, String sessionId) {
    this.messages = new ArrayList<>(messages);
    this.sessionId = sessionId;
  }

  /** Its name in logs, traces and gateways, as the session id of a request. */
  public String sessionId() {
    return sessionId;
  }

  /** The turns, oldest first. */
  public List<ChatMessage> messages() {
    return Collections.unmodifiableList(messages);
  }

  /** The turns and the tools, for the prompt of any request. */
  public Prompt prompt() {
    var chat = ChatPrompt.newBuilder().addAllMessages(messages);
    return Prompt.newBuilder().setChat(chat).addAllTools(tools).build();
  }

  /** A request for the next answer, with the prompt and the session id. */
  public GenerateRequest.Builder request() {
    return GenerateRequest.newBuilder().setPrompt(prompt()).setSessionId(sessionId);
  }

  /** The tools that the model may call. */
  public List<Tool> tools() {
    return tools;
  }

  /**
   * Replaces the tools that the model may call. They come before the turns in the prompt, so nothing is reused after a
   * change. {@link #toJson} does not keep them.
   */
  public Conversation setTools(Tool... tools) {
    this.tools = List.of(tools);
    return this;
  }

  /** The system prompt; empty for none. */
  public String system() {
    return hasSystem() ? messages.get(0).getContent() : "";
  }

  /** Replaces the system prompt; empty for none. Nothing is reused after a change. */
  public Conversation setSystem(String text) {
    if (hasSystem()) {
      messages.remove(0);
    }
    if (!text.isEmpty()) {
      messages.add(0, turn(Role.ROLE_SYSTEM, text).build());
    }
    return this;
  }

  /** Adds a turn of the user. Images come before the text; {@link Images} makes them. */
  public Conversation say(String text, ImagePart... images) {
    if (images.length == 0) {
      messages.add(turn(Role.ROLE_USER, text).build());
      return this;
    }
    var turn = turn(Role.ROLE_USER, "");
    for (ImagePart image : images) {
      turn.addParts(ContentPart.newBuilder().setImage(image));
    }
    if (!text.isEmpty()) {
      turn.addParts(ContentPart.newBuilder().setText(text));
    }
    messages.add(turn.build());
    return this;
  }

  /** Adds an answer as a turn of the assistant. */
  public Conversation add(GenerateResponse answer) {
    return add(answer.getText(), answer.getReasoning(), answer.getToolCallsList(), answer.getTokenIdsList());
  }

  /** As {@link #add(GenerateResponse)}, for a stream. */
  public Conversation add(Reply answer) {
    return add(answer.text(), answer.reasoning(), answer.toolCalls(), answer.tokenIds());
  }

  /** Adds the result of a tool call. */
  public Conversation answer(ToolCall call, String content) {
    messages.add(turn(Role.ROLE_TOOL, content).setName(call.getName()).setToolCallId(call.getId()).build());
    return this;
  }

  /** Removes the last turn of the user and everything after it. Does nothing without such a turn. */
  public void undo() {
    for (int index = messages.size() - 1; index >= 0; index--) {
      if (messages.get(index).getRole() == Role.ROLE_USER) {
        messages.subList(index, messages.size()).clear();
        return;
      }
    }
  }

  /** Returns it as JSON. The clients of all languages read it. */
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
   * Reads what {@link #toJson} wrote, or a plain list of {"role", "content"}. Throws IllegalArgumentException for
   * anything else.
   */
  public static Conversation fromJson(String text) {
    JsonElement facts;
    try {
      facts = JsonParser.parseString(text);
    } catch (JsonParseException error) {
      throw new IllegalArgumentException("not a conversation: " + error.getMessage(), error);
    }
    if (facts.isJsonArray()) {
      return new Conversation(messagesOf(facts), new Conversation().sessionId);
    }
    JsonObject kept = facts.isJsonObject() ? facts.getAsJsonObject() : new JsonObject();
    JsonElement kind = kept.get("kind");
    JsonElement version = kept.get("version");
    if (!String.valueOf(kind).equals("\"" + KIND + "\"") || !String.valueOf(version).equals("" + VERSION)) {
      throw new IllegalArgumentException("not a conversation: kind " + kind + ", version " + version);
    }
    JsonElement named = kept.get("session_id");
    boolean isNamed = named != null && named.isJsonPrimitive() && !named.getAsString().isEmpty();
    String sessionId = isNamed ? named.getAsString() : new Conversation().sessionId;
    return new Conversation(messagesOf(kept.get("messages")), sessionId);
  }

  private Conversation add(String text, String reasoning, List<ToolCall> toolCalls, List<Integer> tokenIds) {
    ChatMessage.Builder turn = turn(Role.ROLE_ASSISTANT, text).setReasoning(reasoning);
    messages.add(turn.addAllToolCalls(toolCalls).addAllTokenIds(tokenIds).build());
    return this;
  }

  private boolean hasSystem() {
    return !messages.isEmpty() && messages.get(0).getRole() == Role.ROLE_SYSTEM;
  }

  private static ChatMessage.Builder turn(Role role, String text) {
    return ChatMessage.newBuilder().setRole(role).setContent(text);
  }

  /** A turn as it is kept: its role by name, and its content even if it is empty. */
  private static JsonObject facts(ChatMessage message) {
    try {
      String text = JsonFormat.printer().preservingProtoFieldNames().print(message);
      JsonObject facts = JsonParser.parseString(text).getAsJsonObject();
      facts.addProperty("role", Roles.nameOf(message));
      facts.remove("role_name");
      facts.addProperty("content", message.getContent());
      return facts;
    } catch (InvalidProtocolBufferException error) {
      throw new AssertionError("a message of known fields can be written", error);
    }
  }

  private static List<ChatMessage> messagesOf(JsonElement facts) {
    if (facts == null || !facts.isJsonArray()) {
      throw new IllegalArgumentException("not a conversation: there is no list of messages");
    }
    var messages = new ArrayList<ChatMessage>();
    for (JsonElement each : facts.getAsJsonArray()) {
      String place = "not a conversation: messages[" + messages.size() + "]";
      var message = ChatMessage.newBuilder();
      try {
        JsonFormat.parser().merge(withRole(each).toString(), message);
      } catch (InvalidProtocolBufferException error) {
        throw new IllegalArgumentException(place + ": " + error.getMessage(), error);
      }
      if (Roles.nameOf(message.build()).isEmpty()) {
        throw new IllegalArgumentException(place + " has no role");
      }
      messages.add(message.build());
    }
    return messages;
  }

  /** A turn with its role as the API has it: "user" is the user's, any other name the template's own. */
  private static JsonElement withRole(JsonElement facts) {
    JsonElement role = facts.isJsonObject() ? facts.getAsJsonObject().get("role") : null;
    if (role == null || !role.isJsonPrimitive() || role.getAsString().startsWith("ROLE_")) {
      return facts;
    }
    String name = role.getAsString();
    JsonObject changed = facts.deepCopy().getAsJsonObject();
    changed.remove("role");
    Roles.of(name)
        .ifPresentOrElse(
            known -> changed.addProperty("role", known.name()), () -> changed.addProperty("role_name", name));
    return changed;
  }
}
