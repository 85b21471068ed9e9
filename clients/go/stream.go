package icehouse

import (
	"context"
	"errors"
	"io"
	"iter"

	"google.golang.org/grpc"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// ErrNotEnded is the error of [Stream.Reply] before the end of the output.
var ErrNotEnded = errors.New("icehouse: the stream has not ended; iterate over it first")

// Stream is a running output. Iterate over Texts or Events, once and from one goroutine.
type Stream struct {
	call   grpc.ServerStreamingClient[icehousev1.StreamResponse]
	err    error
	cancel context.CancelFunc
	sum    replySum
}

// Texts yields the text of the output in pieces; of several completions, that of the first one. It yields an error last,
// if there is one. Leave the loop early to end the output on the server too.
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

// Events yields all events of the API, including reasoning, tool calls and progress. Otherwise it is like Texts.
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

// Started returns the first event of the output, with the request's id and what is reused of the prompt. It is nil
// before that.
func (s *Stream) Started() *icehousev1.Started {
	return s.sum.started
}

// Reply returns the whole output, or the error that ended it. Before the end it returns [ErrNotEnded].
func (s *Stream) Reply() (*Reply, error) {
	if s.err != nil && !errors.Is(s.err, io.EOF) {
		return nil, s.err
	}
	if reply := s.sum.reply(); reply != nil {
		return reply, nil
	}
	return nil, ErrNotEnded
}

// Close ends the output, on the server too. It does nothing after the end.
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
	s.sum.add(response)
	return response, nil
}
