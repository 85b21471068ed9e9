package icehouse

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// Reply is a complete output; of several completions, the first one.
type Reply struct {
	Text      string
	Reasoning string
	// ToolCalls are the calls that the model made, in order.
	ToolCalls []*icehousev1.ToolCall
	TokenIDs  []int32
	// Started has the request's id, the model, the seed and what was reused of the prompt.
	Started *icehousev1.Started
	// Finished has the usage and why the output ended.
	Finished *icehousev1.Finished
}

// ReplyOf returns the output of Generate in the same form as [Stream.Reply].
func ReplyOf(response *icehousev1.GenerateResponse) *Reply {
	return &Reply{
		Text:      response.GetText(),
		Reasoning: response.GetReasoning(),
		ToolCalls: response.GetToolCalls(),
		TokenIDs:  response.GetTokenIds(),
		Started: &icehousev1.Started{
			RequestId:          response.GetRequestId(),
			Model:              response.GetModel(),
			PromptTokens:       response.GetUsage().GetPromptTokens(),
			Cache:              response.GetCache(),
			QueueDuration:      response.GetUsage().GetQueueDuration(),
			Seed:               response.GetSeed(),
			ReceiveTime:        response.GetReceiveTime(),
			SystemFingerprint:  response.GetSystemFingerprint(),
			MaxOutputTokens:    response.GetMaxOutputTokens(),
			UnenforcedKeywords: response.GetUnenforcedKeywords(),
			LoadDuration:       response.GetLoadDuration(),
		},
		Finished: &icehousev1.Finished{
			FinishReason: response.GetFinishReason(),
			StopString:   response.GetStopString(),
			StopTokenId:  response.StopTokenId,
			Usage:        response.GetUsage(),
		},
	}
}

// Message returns the model's turn, for the next request of the conversation. It has the token ids, so that the server
// can reuse its cached blocks.
func (r *Reply) Message() *icehousev1.ChatMessage {
	return &icehousev1.ChatMessage{
		Role:      icehousev1.Role_ROLE_ASSISTANT,
		Content:   r.Text,
		Reasoning: r.Reasoning,
		ToolCalls: r.ToolCalls,
		TokenIds:  r.TokenIDs,
	}
}

// Decode parses a JSON output into a Go value. It returns an error if the output was cut off by a limit.
func (r *Reply) Decode(into any) error {
	if reason := r.Finished.GetFinishReason(); reason != icehousev1.FinishReason_FINISH_REASON_STOP_TOKEN {
		return fmt.Errorf("icehouse: the output ended with %v before it was complete", reason)
	}
	return json.Unmarshal([]byte(r.Text), into)
}

// replySum adds up the events of a stream.
type replySum struct {
	text      strings.Builder
	reasoning strings.Builder
	tokenIDs  []int32
	calls     map[int32]*icehousev1.ToolCall
	started   *icehousev1.Started
	finished  *icehousev1.Finished
}

// add adds the next event. It ignores the deltas of all completions but the first.
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

// reply returns the whole output, or nil before its end.
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
