package icehouse

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

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

func TestAnAnswerHasWhatAStreamSaysAtItsEnds(t *testing.T) {
	usage := &icehousev1.Usage{PromptTokens: 3, QueueDuration: durationpb.New(time.Second)}
	cache := &icehousev1.CacheReport{CachedTokens: 2}
	now := timestamppb.Now()
	reply := ReplyOf(&icehousev1.GenerateResponse{
		RequestId: "r", Model: "m", FinishReason: icehousev1.FinishReason_FINISH_REASON_STOP_STRING, StopString: "s",
		StopTokenId: new(int32(2)), Usage: usage, Cache: cache, Seed: 7, ReceiveTime: now, SystemFingerprint: "f",
		MaxOutputTokens: 9, UnenforcedKeywords: []string{"k"}, LoadDuration: durationpb.New(time.Minute),
	})
	started := &icehousev1.Started{
		RequestId: "r", Model: "m", PromptTokens: 3, Cache: cache, QueueDuration: usage.GetQueueDuration(), Seed: 7,
		ReceiveTime: now, SystemFingerprint: "f", MaxOutputTokens: 9, UnenforcedKeywords: []string{"k"},
		LoadDuration: durationpb.New(time.Minute),
	}
	finished := &icehousev1.Finished{
		FinishReason: icehousev1.FinishReason_FINISH_REASON_STOP_STRING, StopString: "s", StopTokenId: new(int32(2)),
		Usage: usage,
	}
	if !proto.Equal(reply.Started, started) || !proto.Equal(reply.Finished, finished) {
		t.Error(reply.Started, reply.Finished)
	}
	// Fields that the API gets later must not be forgotten.
	for _, message := range []protoreflect.Message{reply.Started.ProtoReflect(), reply.Finished.ProtoReflect()} {
		fields := message.Descriptor().Fields()
		for i := range fields.Len() {
			if field := fields.Get(i); field.Name() != "completion_index" && !message.Has(field) {
				t.Error(field.FullName(), "is not set")
			}
		}
	}
}
