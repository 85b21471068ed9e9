package icehouse

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

func deltaEvent(delta *icehousev1.Delta) *icehousev1.StreamResponse {
	return &icehousev1.StreamResponse{Event: &icehousev1.StreamResponse_Delta{Delta: delta}}
}

func TestToolCallsAreAssembledFromTheirPieces(t *testing.T) {
	var sum replySum
	for _, piece := range []*icehousev1.ToolCallDelta{
		{Index: 1, Id: "b", Name: "second"},
		{Index: 0, Id: "a", Name: "first", ArgumentsJson: `{"x":`},
		{Index: 2, Id: "c", Name: "broken"},
		{Index: 0, ArgumentsJson: `1}`},
		{Index: 2, Withdrawn: true},
		{Index: 1, ArgumentsJson: `{}`},
	} {
		sum.add(deltaEvent(&icehousev1.Delta{ToolCall: piece}))
	}
	sum.add(deltaEvent(&icehousev1.Delta{CompletionIndex: 1, Text: "another"}))
	if sum.reply() != nil {
		t.Error("a reply before the end")
	}
	sum.add(&icehousev1.StreamResponse{Event: &icehousev1.StreamResponse_Finished{Finished: &icehousev1.Finished{}}})
	reply := sum.reply()
	if len(reply.ToolCalls) != 2 || reply.Text != "" {
		t.Fatal(reply)
	}
	for i, want := range []*icehousev1.ToolCall{
		{Id: "a", Name: "first", ArgumentsJson: `{"x":1}`},
		{Id: "b", Name: "second", ArgumentsJson: `{}`},
	} {
		if !proto.Equal(reply.ToolCalls[i], want) {
			t.Error(reply.ToolCalls[i])
		}
	}
}

func TestAnOutputThatALimitCutIsNotDecoded(t *testing.T) {
	reply := ReplyOf(&icehousev1.GenerateResponse{
		Text: `{}`, FinishReason: icehousev1.FinishReason_FINISH_REASON_LENGTH,
	})
	var into struct{}
	if err := reply.Decode(&into); err == nil || !strings.Contains(err.Error(), "FINISH_REASON_LENGTH") {
		t.Error(err)
	}
}

func TestAnOrderIsAboutAllThatTheCachedBlocksDependOn(t *testing.T) {
	request := &icehousev1.GenerateRequest{
		RequestId: "r", Model: "m", Adapter: "a", Priority: 2, MaxOutputTokens: 9,
		Prompt: Chat(Message("user", "Hi")),
		Tools:  []*icehousev1.Tool{{Name: "t"}},
		Cache:  &icehousev1.CachePolicy{Tenant: "blue"},
	}
	chat := &icehousev1.ChatPrompt{Messages: []*icehousev1.ChatMessage{Message("user", "Hi")}}
	warm := about(request, &icehousev1.WarmRequest{})
	if !proto.Equal(warm, &icehousev1.WarmRequest{
		RequestId: "r", Model: "m", Adapter: "a", Priority: 2,
		Prompt: &icehousev1.WarmRequest_Chat{Chat: chat}, Tools: request.Tools, Cache: request.Cache,
	}) {
		t.Error(warm)
	}
	evict := about(request, &icehousev1.EvictRequest{})
	if !proto.Equal(evict.GetChat(), chat) || PrefixKey(evict) != PrefixKey(request) {
		t.Error(evict)
	}
}

func TestAnAnswerHasWhatAStreamSaysAtItsEnds(t *testing.T) {
	usage := &icehousev1.Usage{PromptTokens: 3}
	reply := ReplyOf(&icehousev1.GenerateResponse{
		RequestId: "r", Seed: 7, SystemFingerprint: "f", StopTokenId: new(int32(2)), Usage: usage,
	})
	started := &icehousev1.Started{RequestId: "r", Seed: 7, SystemFingerprint: "f", PromptTokens: 3}
	finished := &icehousev1.Finished{StopTokenId: new(int32(2)), Usage: usage}
	if !proto.Equal(reply.Started, started) || !proto.Equal(reply.Finished, finished) {
		t.Error(reply.Started, reply.Finished)
	}
}

// What copyShared relies on.
func TestSharedFieldsAreOfOneType(t *testing.T) {
	request, response := &icehousev1.GenerateRequest{}, &icehousev1.GenerateResponse{}
	for to, from := range map[proto.Message]proto.Message{
		&icehousev1.ExplainRequest{}: request,
		&icehousev1.WarmRequest{}:    request,
		&icehousev1.PinRequest{}:     request,
		&icehousev1.UnpinRequest{}:   request,
		&icehousev1.EvictRequest{}:   request,
		&icehousev1.Started{}:        response,
		&icehousev1.Finished{}:       response,
	} {
		fields, target := from.ProtoReflect().Descriptor().Fields(), to.ProtoReflect().Descriptor()
		for i := range fields.Len() {
			field := fields.Get(i)
			same := target.Fields().ByName(field.Name())
			if same == nil {
				continue
			}
			if same.Kind() != field.Kind() || same.Cardinality() != field.Cardinality() || same.Message() != field.Message() {
				t.Errorf("%s is not %s", same.FullName(), field.FullName())
			}
		}
	}
}
