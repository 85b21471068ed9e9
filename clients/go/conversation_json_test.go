package icehouse

import (
	"encoding/json"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// keptText is a conversation as the Python client writes it.
const keptText = `{"kind": "icehouse-conversation", "version": 1, "session_id": "s1", "messages": [
	{"role": "system", "content": "Be brief."},
	{"role": "user", "content": "", "parts": [
		{"image": {"data": "R0lGOA==", "media_type": "image/gif"}}, {"text": "Rain? 🌧"}]},
	{"role": "assistant", "content": "", "reasoning": "hm", "token_ids": [1, 2],
		"tool_calls": [{"id": "c1", "name": "weather", "arguments_json": "{\"city\": \"Oslo\"}"}]},
	{"role": "tool", "content": "dry", "name": "weather", "tool_call_id": "c1"}]}`

func keptExample() *Conversation {
	call := &icehousev1.ToolCall{Id: "c1", Name: "weather", ArgumentsJson: `{"city": "Oslo"}`}
	talk := NewConversation("Be brief.")
	talk.SessionID = "s1"
	talk.Say("Rain? 🌧", Image([]byte("GIF8"), "image/gif"))
	talk.Add(&Reply{Reasoning: "hm", ToolCalls: []*icehousev1.ToolCall{call}, TokenIDs: []int32{1, 2}})
	talk.Answer(call, "dry")
	return talk
}

func TestAConversationIsKeptInTheFormOfEveryLanguage(t *testing.T) {
	for _, talk := range []any{keptExample(), *keptExample()} {
		text, err := json.Marshal(talk)
		if err != nil || !sameJSON(t, string(text), keptText) {
			t.Errorf("%T: %s: %v", talk, text, err)
		}
	}
	var again Conversation
	if err := json.Unmarshal([]byte(keptText), &again); err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(again.Request(), keptExample().Request()) {
		t.Error(again.Request())
	}
	if err := json.Unmarshal([]byte(`[{"role": "user", "content": "Hi"}]`), &again); err != nil {
		t.Fatal(err)
	}
	if len(again.Messages) != 1 || again.Messages[0].GetContent() != "Hi" || again.SessionID == "s1" {
		t.Error(again.Messages, again.SessionID)
	}
}

func TestWhatIsNoConversationIsRefusedWithItsPlace(t *testing.T) {
	for text, problem := range map[string]string{
		`"Hi"`:             "no conversation",
		`null`:             `of kind "", version 0`,
		`{"messages": []}`: `of kind "", version 0`,
		`{"kind": "icehouse-conversation", "version": 2}`: "version 2",
		`{"kind": "icehouse-conversation", "version": 1}`: "no list of messages",
		`[7]`:                                  "messages[0]",
		`[{"role": "user", "contents": "Hi"}]`: "contents",
		`[{"content": "Hi"}]`:                  "messages[0] has no role",
	} {
		var talk Conversation
		if err := json.Unmarshal([]byte(text), &talk); err == nil || !strings.Contains(err.Error(), problem) {
			t.Errorf("%s: %v has no %q", text, err, problem)
		}
	}
}
