package icehouse

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// Reply is a complete output and the server's first and last word on it. Where several completions were
// asked for it is the first of them.
type Reply struct {
	Text      string
	Reasoning string
	// ToolCalls are the calls that the model asks for, in order.
	ToolCalls []*icehousev1.ToolCall
	TokenIDs  []int32
	// Started holds the request's id, model, seed and what was reused of the prompt.
	Started *icehousev1.Started
	// Finished holds the reason of the end and the usage.
	Finished *icehousev1.Finished
}

// ReplyOf returns the answer of Generate in the form that a stream's has.
func ReplyOf(response *icehousev1.GenerateResponse) *Reply {
	reply := &Reply{
		Text:      response.GetText(),
		Reasoning: response.GetReasoning(),
		ToolCalls: response.GetToolCalls(),
		TokenIDs:  response.GetTokenIds(),
		Started: &icehousev1.Started{
			PromptTokens:  response.GetUsage().GetPromptTokens(),
			QueueDuration: response.GetUsage().GetQueueDuration(),
		},
		Finished: &icehousev1.Finished{},
	}
	copyShared(response, reply.Started)
	copyShared(response, reply.Finished)
	return reply
}

// Message returns the assistant's turn, for the next request of the conversation. With its token ids the
// server goes on from the blocks that it has cached.
func (r *Reply) Message() *icehousev1.ChatMessage {
	return &icehousev1.ChatMessage{
		Role:      "assistant",
		Content:   r.Text,
		Reasoning: r.Reasoning,
		ToolCalls: r.ToolCalls,
		TokenIds:  r.TokenIDs,
	}
}

// Decode reads an output in a JSON format into a Go value. An output that a limit cut is refused.
func (r *Reply) Decode(into any) error {
	if reason := r.Finished.GetFinishReason(); reason != icehousev1.FinishReason_FINISH_REASON_STOP_TOKEN {
		return fmt.Errorf("icehouse: the output ended with %v before it was complete", reason)
	}
	return json.Unmarshal([]byte(r.Text), into)
}

// replySum adds the events of a stream up.
type replySum struct {
	text      strings.Builder
	reasoning strings.Builder
	tokenIDs  []int32
	calls     map[int32]*icehousev1.ToolCall
	started   *icehousev1.Started
	finished  *icehousev1.Finished
}

// add takes the next event; those of other completions than the first count for nothing.
func (s *replySum) add(response *icehousev1.StreamResponse) {
	switch event := response.GetEvent().(type) {
	case *icehousev1.StreamResponse_Started:
		s.started = event.Started
	case *icehousev1.StreamResponse_Delta:
		if event.Delta.GetCompletionIndex() == 0 {
			s.text.WriteString(event.Delta.GetText())
			s.reasoning.WriteString(event.Delta.GetReasoning())
			s.tokenIDs = append(s.tokenIDs, event.Delta.GetTokenIds()...)
			s.addCall(event.Delta.GetToolCall())
		}
	case *icehousev1.StreamResponse_Finished:
		if event.Finished.GetCompletionIndex() == 0 {
			s.finished = event.Finished
		}
	}
}

func (s *replySum) addCall(piece *icehousev1.ToolCallDelta) {
	switch call := s.calls[piece.GetIndex()]; {
	case piece == nil:
	case piece.GetWithdrawn():
		delete(s.calls, piece.GetIndex())
	case call != nil:
		call.ArgumentsJson += piece.GetArgumentsJson()
	default:
		if s.calls == nil {
			s.calls = map[int32]*icehousev1.ToolCall{}
		}
		s.calls[piece.GetIndex()] = &icehousev1.ToolCall{
			Id: piece.GetId(), Name: piece.GetName(), ArgumentsJson: piece.GetArgumentsJson(),
		}
	}
}

// reply returns the whole; nil before the end.
func (s *replySum) reply() *Reply {
	if s.finished == nil {
		return nil
	}
	calls := make([]*icehousev1.ToolCall, 0, len(s.calls))
	for _, index := range slices.Sorted(maps.Keys(s.calls)) {
		calls = append(calls, s.calls[index])
	}
	return &Reply{
		Text:      s.text.String(),
		Reasoning: s.reasoning.String(),
		ToolCalls: calls,
		TokenIDs:  s.tokenIDs,
		Started:   s.started,
		Finished:  s.finished,
	}
}
