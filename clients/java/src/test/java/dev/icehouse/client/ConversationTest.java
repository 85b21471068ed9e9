package dev.icehouse.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.gson.JsonParser;
import dev.icehouse.v1.ChatMessage;
import dev.icehouse.v1.GenerateResponse;
import dev.icehouse.v1.Role;
import dev.icehouse.v1.Tool;
import dev.icehouse.v1.ToolCall;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Map;
import org.junit.jupiter.api.Test;

/** What each turn sends, what is kept in a file, files that are none. */
class ConversationTest {
  private static final ToolCall CALL =
      ToolCall.newBuilder().setId("c1").setName("weather").setArgumentsJson("{\"city\": \"Oslo\"}").build();

  /** As the Python client writes it. */
  private static final String KEPT =
      """
      {"kind": "icehouse-conversation", "version": 1, "session_id": "s1", "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain? 🌧"},
        {"role": "assistant", "content": "", "reasoning": "hm", "token_ids": [1, 2],
         "tool_calls": [{"id": "c1", "name": "weather", "arguments_json": "{\\"city\\": \\"Oslo\\"}"}]},
        {"role": "tool", "content": "dry", "name": "weather", "tool_call_id": "c1"}]}
      """;

  private static Conversation example() {
    var answer =
        GenerateResponse.newBuilder().setReasoning("hm").addToolCalls(CALL).addTokenIds(1).addTokenIds(2).build();
    var talk = new Conversation(List.of(), "s1").setSystem("Be brief.").say("Rain? 🌧");
    return talk.add(answer).answer(CALL, "dry");
  }

  private static List<String> contents(Conversation talk) {
    return talk.messages().stream().map(ChatMessage::getContent).toList();
  }

  @Test
  void itIsKeptInTheFormOfEveryLanguageAndIsWhatItWasWhenReadAgain() {
    String text = example().toJson();
    assertEquals(JsonParser.parseString(KEPT), JsonParser.parseString(text));
    var again = Conversation.fromJson(text);
    assertEquals(example().messages(), again.messages());
    assertEquals("s1", again.sessionId());
    assertEquals(again.messages(), again.prompt().getChat().getMessagesList());
  }

  @Test
  void itsRequestHasTurnsToolsAndSession() {
    var tool = Tool.newBuilder().setName("weather").build();
    var request = example().setTools(tool).request().setMaxOutputTokens(4).build();
    assertEquals(example().prompt().getChat(), request.getPrompt().getChat());
    assertEquals(List.of(tool), request.getPrompt().getToolsList());
    assertEquals("s1", request.getSessionId());
    assertEquals(0, example().setTools(tool).setTools().prompt().getToolsCount());
  }

  @Test
  void turnsAreTakenBackAndTheSystemPromptIsExchanged() {
    var talk = new Conversation();
    assertNotEquals(talk.sessionId(), new Conversation().sessionId());
    talk.undo();
    talk.say("one").add(GenerateResponse.newBuilder().setText("two").build()).setSystem("Be kind.").say("three");
    talk.undo();
    assertEquals(List.of("Be kind.", "one", "two"), contents(talk));
    assertEquals("", talk.setSystem("").system());
    assertEquals(List.of("one", "two"), contents(talk));
  }

  @Test
  void picturesStandBeforeTheTextAndAreKeptInTheFormOfEveryLanguage() {
    byte[] gif = "GIF8".getBytes(StandardCharsets.US_ASCII);
    var talk = new Conversation(List.of(), "s1").say("What is it?", Images.of(gif, "image/gif"));
    String kept =
        """
        {"kind": "icehouse-conversation", "version": 1, "session_id": "s1", "messages": [
          {"role": "user", "content": "", "parts": [
            {"image": {"data": "R0lGOA==", "media_type": "image/gif"}}, {"text": "What is it?"}]}]}
        """;
    assertEquals(JsonParser.parseString(kept), JsonParser.parseString(talk.toJson()));
    assertEquals(talk.messages(), Conversation.fromJson(kept).messages());
  }

  @Test
  void aPlainListIsReadToo() {
    assertEquals(List.of("Hi"), contents(Conversation.fromJson("[{\"role\": \"user\", \"content\": \"Hi\"}]")));
  }

  @Test
  void aRoleIsKeptByItsNameATemplatesOwnTooAndReadAsTheApiHasIt() {
    var talk = Conversation.fromJson("[{\"role\": \"ROLE_USER\"}, {\"role\": \"ipython\", \"content\": \"1\"}]");
    assertEquals(Role.ROLE_USER, talk.messages().get(0).getRole());
    assertEquals(Role.ROLE_UNSPECIFIED, talk.messages().get(1).getRole());
    assertEquals("ipython", talk.messages().get(1).getRoleName());
    var kept = JsonParser.parseString(talk.toJson()).getAsJsonObject().get("messages");
    var wanted = "[{\"role\": \"user\", \"content\": \"\"}, {\"role\": \"ipython\", \"content\": \"1\"}]";
    assertEquals(JsonParser.parseString(wanted), kept);
  }

  @Test
  void whatIsNoConversationIsRefusedWithItsPlace() {
    Map.of(
            "{", "not a conversation",
            "{\"messages\": []}", "kind null, version null",
            "{\"kind\": \"icehouse-conversation\", \"version\": 2}", "version 2",
            "{\"kind\": \"icehouse-conversation\", \"version\": 1}", "no list of messages",
            "[\"Hi\"]", "messages[0]",
            "[{\"role\": \"user\", \"contents\": \"Hi\"}]", "contents",
            "[{\"content\": \"Hi\"}]", "messages[0] has no role")
        .forEach(
            (text, problem) -> {
              var error = assertThrows(IllegalArgumentException.class, () -> Conversation.fromJson(text));
              assertTrue(error.getMessage().contains(problem), error.getMessage());
            });
  }
}
