package icehouse

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// Explain returns what Generate would reuse of a prompt, without running it.
func (c *Client) Explain(
	ctx context.Context, request *icehousev1.ExplainRequest,
) (*icehousev1.ExplainResponse, error) {
	return c.Cache.Explain(ctx, request)
}

// Warm computes a prompt and keeps it in the cache, without generating. It calls progress as it goes.
func (c *Client) Warm(
	ctx context.Context, request *icehousev1.WarmRequest, progress ...func(*icehousev1.WarmProgress),
) (*icehousev1.WarmResult, error) {
	return run(ctx, c.Cache.Warm, request, progress,
		(*icehousev1.WarmResponse).GetProgress, (*icehousev1.WarmResponse).GetDone)
}

// Pin protects the cached blocks of a prompt from eviction by policy.
func (c *Client) Pin(ctx context.Context, request *icehousev1.PinRequest) (*icehousev1.PinResponse, error) {
	return c.Cache.Pin(ctx, request)
}

// Unpin removes the protection of Pin.
func (c *Client) Unpin(ctx context.Context, request *icehousev1.UnpinRequest) (*icehousev1.UnpinResponse, error) {
	return c.Cache.Unpin(ctx, request)
}

// Evict removes the cached blocks of a prompt, including pinned ones. It calls progress as it goes. When ctx ends,
// the blocks that are left stay cached.
func (c *Client) Evict(
	ctx context.Context, request *icehousev1.EvictRequest, progress ...func(*icehousev1.EvictProgress),
) (*icehousev1.EvictResult, error) {
	return run(ctx, c.Cache.Evict, request, progress,
		(*icehousev1.EvictResponse).GetProgress, (*icehousev1.EvictResponse).GetDone)
}

// EvictAll removes all blocks of a model, of every tenant, as Evict does. Only for operators.
func (c *Client) EvictAll(
	ctx context.Context, request *icehousev1.EvictAllRequest, progress ...func(*icehousev1.EvictProgress),
) (*icehousev1.EvictResult, error) {
	return run(ctx, c.Cache.EvictAll, request, progress,
		(*icehousev1.EvictAllResponse).GetProgress, (*icehousev1.EvictAllResponse).GetDone)
}

// Verify reads blocks on SSD and compares their checksums. It calls progress as it goes. Only for operators.
func (c *Client) Verify(
	ctx context.Context, request *icehousev1.VerifyRequest, progress ...func(*icehousev1.VerifyProgress),
) (*icehousev1.VerifyResult, error) {
	return run(ctx, c.Cache.Verify, request, progress,
		(*icehousev1.VerifyResponse).GetProgress, (*icehousev1.VerifyResponse).GetDone)
}

// run calls a command, passes its progress on and returns its result.
func run[Request, Event, Progress, Result any](
	ctx context.Context,
	command func(context.Context, *Request, ...grpc.CallOption) (grpc.ServerStreamingClient[Event], error),
	request *Request, progress []func(*Progress),
	progressOf func(*Event) *Progress, resultOf func(*Event) *Result,
) (*Result, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	call, err := command(ctx, request)
	if err != nil {
		return nil, err
	}
	var result *Result
	for {
		event, err := call.Recv()
		switch {
		case errors.Is(err, io.EOF) && result == nil:
			return nil, errorFrom(status.Error(codes.Internal, "the server ended the command without a result"))
		case errors.Is(err, io.EOF):
			return result, nil
		case err != nil:
			return nil, err
		}
		if done := resultOf(event); done != nil {
			result = done
		}
		step := progressOf(event)
		for _, tell := range progress {
			if step != nil && tell != nil {
				tell(step)
			}
		}
	}
}
