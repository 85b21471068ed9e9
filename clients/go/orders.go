package icehouse

import (
	"context"
	"errors"
	"io"
	"iter"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// Explain returns what Generate of this request would reuse of its prompt. Like the other orders about a
// prompt it reads of the request what its cached blocks depend on: prompt, model, adapter, tools and cache.
func (c *Client) Explain(
	ctx context.Context, request *icehousev1.GenerateRequest,
) (*icehousev1.ExplainResponse, error) {
	return c.Cache.Explain(ctx, about(request, &icehousev1.ExplainRequest{}))
}

// Warm computes the request's prompt and keeps it, without an output, under the request's id and priority.
func (c *Client) Warm(
	ctx context.Context, request *icehousev1.GenerateRequest,
) (*icehousev1.WarmResponse, error) {
	return c.Cache.Warm(ctx, about(request, &icehousev1.WarmRequest{}))
}

// WarmWithProgress is Warm, and calls progress with how far it is. It has no deadline but that of ctx.
func (c *Client) WarmWithProgress(
	ctx context.Context, request *icehousev1.GenerateRequest, progress func(*icehousev1.PrefillProgress),
) (*icehousev1.WarmResponse, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	call, err := c.Cache.WarmWithProgress(ctx, about(request, &icehousev1.WarmRequest{}))
	if err != nil {
		return nil, err
	}
	return finished(call, progress, (*icehousev1.WarmWithProgressResponse).GetPrefillProgress,
		(*icehousev1.WarmWithProgressResponse).GetFinished)
}

// Pin keeps the known blocks of the request's prompt from being evicted by policy.
func (c *Client) Pin(ctx context.Context, request *icehousev1.GenerateRequest) (*icehousev1.PinResponse, error) {
	return c.Cache.Pin(ctx, about(request, &icehousev1.PinRequest{}))
}

// Unpin takes the pins off the blocks of the request's prompt.
func (c *Client) Unpin(
	ctx context.Context, request *icehousev1.GenerateRequest,
) (*icehousev1.UnpinResponse, error) {
	return c.Cache.Unpin(ctx, about(request, &icehousev1.UnpinRequest{}))
}

// Evict removes the known blocks of the request's prompt, pinned ones too. For operators,
// Client.Cache.Evict with All removes every block of a model.
func (c *Client) Evict(
	ctx context.Context, request *icehousev1.GenerateRequest,
) (*icehousev1.EvictResponse, error) {
	return c.Cache.Evict(ctx, about(request, &icehousev1.EvictRequest{}))
}

// EvictWithProgress is Evict piece by piece: it calls progress with how far it is, and goes no further
// once ctx ends. It has no deadline but that of ctx.
func (c *Client) EvictWithProgress(
	ctx context.Context, request *icehousev1.GenerateRequest, progress func(*icehousev1.EvictProgress),
) (*icehousev1.EvictResponse, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	call, err := c.Cache.EvictWithProgress(ctx, about(request, &icehousev1.EvictRequest{}))
	if err != nil {
		return nil, err
	}
	return finished(call, progress, (*icehousev1.EvictWithProgressResponse).GetProgress,
		(*icehousev1.EvictWithProgressResponse).GetFinished)
}

// Verify has blocks on SSD read and compared, for operators: at most blockLimit, from where the last check
// ended, or all of them for 0.
func (c *Client) Verify(ctx context.Context, blockLimit int64) (*icehousev1.VerifyResponse, error) {
	return c.Cache.Verify(ctx, &icehousev1.VerifyRequest{BlockLimit: blockLimit})
}

// VerifyWithProgress is Verify, and calls progress with how far it is. It has no deadline but that of ctx.
func (c *Client) VerifyWithProgress(
	ctx context.Context, blockLimit int64, progress func(*icehousev1.VerifyProgress),
) (*icehousev1.VerifyResponse, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	call, err := c.Cache.VerifyWithProgress(ctx, &icehousev1.VerifyRequest{BlockLimit: blockLimit})
	if err != nil {
		return nil, err
	}
	return finished(call, progress, (*icehousev1.VerifyWithProgressResponse).GetProgress,
		(*icehousev1.VerifyWithProgressResponse).GetFinished)
}

// WatchStats yields the server's counters, now and then at an interval; 0 is the server's own. An error is
// the last thing that comes. Leaving the loop ends it.
func (c *Client) WatchStats(
	ctx context.Context, interval time.Duration,
) iter.Seq2[*icehousev1.CacheStatsResponse, error] {
	return func(yield func(*icehousev1.CacheStatsResponse, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		request := &icehousev1.WatchStatsRequest{}
		if interval != 0 {
			request.Interval = durationpb.New(interval)
		}
		call, err := c.Cache.WatchStats(ctx, request)
		for err == nil {
			var response *icehousev1.WatchStatsResponse
			response, err = call.Recv()
			if err == nil && !yield(response.GetStats(), nil) {
				return
			}
		}
		if !errors.Is(err, io.EOF) {
			yield(nil, err)
		}
	}
}

// about returns an order about a request's prompt, filled in with all that the two messages share.
func about[Order proto.Message](request *icehousev1.GenerateRequest, order Order) Order {
	copyShared(request, order)
	return order
}

// copyShared copies the fields of equal name from a message to another; those of the API mean the same.
func copyShared(from, to proto.Message) {
	target := to.ProtoReflect()
	from.ProtoReflect().Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		if same := target.Descriptor().Fields().ByName(field.Name()); same != nil {
			target.Set(same, value)
		}
		return true
	})
}

// finished reads a call to its last event, which has the answer, and passes on the others' progress.
func finished[Event, Progress, Answer any](
	call grpc.ServerStreamingClient[Event], tell func(*Progress),
	progressOf func(*Event) *Progress, answerOf func(*Event) *Answer,
) (*Answer, error) {
	for {
		event, err := call.Recv()
		if errors.Is(err, io.EOF) {
			return nil, io.ErrUnexpectedEOF
		}
		if err != nil {
			return nil, err
		}
		if answer := answerOf(event); answer != nil {
			return answer, nil
		}
		if progress := progressOf(event); progress != nil {
			tell(progress)
		}
	}
}
