package icehouse

import (
	"context"
	"errors"
	"io"
	"iter"
	"strings"

	"google.golang.org/grpc"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// ErrNotEnded is what Reply returns before the end of the output.
var ErrNotEnded = errors.New("icehouse: the stream has not ended; iterate over it first")

// Stream is a running output. Iterate once, over Texts or Events, from one goroutine.
type Stream struct {
	call   grpc.ServerStreamingClient[icehousev1.StreamResponse]
	err    error
	cancel context.CancelFunc
	text   strings.Builder
	reply  Reply
}

// Reply is a complete output and the server's first and last word on it. Where several completions were
// asked for it is the first of them; Events has them all.
type Reply struct {
	Text     string
	TokenIDs []int32
	// Started holds the request's id, model, seed and what was reused of the prompt.
	Started *icehousev1.Started
	// Finished holds the reason of the end and the usage.
	Finished *icehousev1.Finished
}

// Texts yields the output's pieces of text, of several completions the first one's. An error is the last thing that comes, with an empty piece.
// Leaving the loop early ends the output on the server.
func (s *Stream) Texts() iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		for event, err := range s.Events() {
			text := ""
			if delta := event.GetDelta(); delta.GetCompletionIndex() == 0 {
				text = delta.GetText()
			}
			if (err != nil || text != "") && !yield(text, err) {
				return
			}
		}
	}
}

// Events yields every event as the API has it, reasoning, tool calls and progress among them. Errors and
// early leaving as with Texts.
func (s *Stream) Events() iter.Seq2[*icehousev1.StreamResponse, error] {
	return func(yield func(*icehousev1.StreamResponse, error) bool) {
		defer s.Close()
		for {
			event, err := s.receive()
			if errors.Is(err, io.EOF) {
				return
			}
			if !yield(event, err) || err != nil {
				return
			}
		}
	}
}

// Reply returns the whole output; ErrNotEnded before its end, and the error it ended with.
func (s *Stream) Reply() (*Reply, error) {
	if s.err != nil && !errors.Is(s.err, io.EOF) {
		return nil, s.err
	}
	if s.reply.Finished == nil {
		return nil, ErrNotEnded
	}
	reply := s.reply
	reply.Text = s.text.String()
	return &reply, nil
}

// Close ends the output on the server too. Harmless after the end.
func (s *Stream) Close() {
	s.cancel()
}

func (s *Stream) receive() (*icehousev1.StreamResponse, error) {
	if s.err != nil {
		return nil, s.err
	}
	response, err := s.call.Recv()
	if err != nil {
		s.err = err
		return nil, err
	}
	switch event := response.GetEvent().(type) {
	case *icehousev1.StreamResponse_Started:
		s.reply.Started = event.Started
	case *icehousev1.StreamResponse_Delta:
		if event.Delta.GetCompletionIndex() == 0 {
			s.text.WriteString(event.Delta.GetText())
			s.reply.TokenIDs = append(s.reply.TokenIDs, event.Delta.GetTokenIds()...)
		}
	case *icehousev1.StreamResponse_Finished:
		if event.Finished.GetCompletionIndex() == 0 {
			s.reply.Finished = event.Finished
		}
	}
	return response, nil
}
