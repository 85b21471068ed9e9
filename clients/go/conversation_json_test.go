package icehouse

import (
	"encoding/json"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// savedText is a conversation as the Python client writes it.
const savedText = `{"kind": "icehouse-conversation", "version": 1, "session_id": "s1", "messages": [
	{"role": "system", "content": "Be brief."},
	{"role": "user", "content": "", "parts": [
		{"image": {"data": "R0lGOA==", "media_type": "image/gif"}}, {"text": "Rain? 🌧"}]},
	{"role": "assistant", "content": "", "reasoning": "hm", "token_ids": [1, 2],
		"tool_calls": [{"id": "c1", "name": "weather", "arguments_json": "{\"city\": \"Oslo\"}"}]},
	{"role": "tool", "content": "dry", "name": "weather", "tool_call_id": "c1"}]}`

func savedExample() *Conversation {
	call := &icehousev1.ToolCall{Id: "c1", Name: "weather", ArgumentsJson: `{"city": "Oslo"}`}
	talk := NewConversation("Be brief.")
	talk.SessionID = "s1"
	talk.Say("Rain? 🌧", Image([]byte("GIF8"), "image/gif"))
	talk.Add(&Reply{Reasoning: "hm", ToolCalls: []*icehousev1.ToolCall{call}, TokenIDs: []int32{1, 2}})
	talk.Answer(call, "dry")
	return talk
}

func TestAConversationIsSavedAsInEveryLanguage(t *testing.T) {
	for _, talk := range []any{savedExample(), *savedExample()} {
		text, err := json.Marshal(talk)
		if err != nil || !sameJSON(t, string(text), savedText) {
			t.Errorf("%T: %s: %v", talk, text, err)
		}
	}
	var again Conversation
	if err := json.Unmarshal([]byte(savedText), &again); err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(again.Request(), savedExample().Request()) {
		t.Error(again.Request())
	}
	if err := json.Unmarshal([]byte(`[{"role": "user", "content": "Hi"}]`), &again); err != nil {
		t.Fatal(err)
	}
	if len(again.Messages) != 1 || again.Messages[0].GetContent() != "Hi" || again.SessionID == "s1" {
		t.Error(again.Messages, again.SessionID)
	}
}

func TestARoleOfATemplatesOwnIsSavedByItsName(t *testing.T) {
	own := Conversation{Messages: []*icehousev1.ChatMessage{{RoleName: "ipython", Content: "1 + 1"}}}
	text, err := json.Marshal(own)
	if err != nil || !strings.Contains(string(text), `"role":"ipython"`) || strings.Contains(string(text), "role_name") {
		t.Error(string(text), err)
	}
	var again Conversation
	if err := json.Unmarshal(text, &again); err != nil || !proto.Equal(again.Messages[0], own.Messages[0]) {
		t.Error(again.Messages, err)
	}
}

func TestJSONThatIsNoConversationIsRefusedAndSaysWhere(t *testing.T) {
	for text, problem := range map[string]string{
		`"Hi"`:             "not a conversation",
		`null`:             `of kind "", version 0`,
		`{"messages": []}`: `of kind "", version 0`,
		`{"kind": "icehouse-conversation", "version": 2}`: "version 2",
		`{"kind": "icehouse-conversation", "version": 1}`: "it has no list of messages",
		`[7]`:                                  "messages[0]",
		`[{"role": "user", "contents": "Hi"}]`: "contents",
		`[{"content": "Hi"}]`:                  "messages[0]: it has no role",
	} {
		var talk Conversation
		if err := json.Unmarshal([]byte(text), &talk); err == nil || !strings.Contains(err.Error(), problem) {
			t.Errorf("%s: %v has no %q", text, err, problem)
		}
	}
}
