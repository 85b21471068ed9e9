package icehouse

import (
	"context"
	"errors"
	"io"
	"iter"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// pageSize is how many requests ListRequests fetches at once.
const pageSize = 1000

// GetServer returns the server's version, state, features and limits.
func (c *Client) GetServer(ctx context.Context) (*icehousev1.Server, error) {
	response, err := c.Server.GetServer(ctx, &icehousev1.GetServerRequest{})
	return response.GetServer(), err
}

// GetStats returns the counters of the engine, the prefix cache and the tenants. Where callers authenticate, only
// operators get all of them; tenants get their own.
func (c *Client) GetStats(ctx context.Context) (*icehousev1.ServerStats, error) {
	response, err := c.Server.GetStats(ctx, &icehousev1.GetStatsRequest{})
	return response.GetStats(), err
}

// WatchStats yields the counters of GetStats at once and then at an interval; 0 is the server's default, 1 s. It
// yields an error last, if there is one. Leave the loop to end the call.
func (c *Client) WatchStats(
	ctx context.Context, interval time.Duration,
) iter.Seq2[*icehousev1.ServerStats, error] {
	return func(yield func(*icehousev1.ServerStats, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		request := &icehousev1.WatchStatsRequest{}
		if interval != 0 {
			request.Interval = durationpb.New(interval)
		}
		call, err := c.Server.WatchStats(ctx, request)
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

// ListRequests yields the requests that wait or run, the oldest first: those of the caller's tenant, or all of them
// for operators. It yields an error last, if there is one.
func (c *Client) ListRequests(ctx context.Context) iter.Seq2[*icehousev1.RequestInfo, error] {
	return func(yield func(*icehousev1.RequestInfo, error) bool) {
		page := &icehousev1.ListRequestsRequest{PageSize: pageSize}
		for {
			response, err := c.Server.ListRequests(ctx, page)
			if err != nil {
				yield(nil, err)
				return
			}
			for _, request := range response.GetRequests() {
				if !yield(request, nil) {
					return
				}
			}
			if page.PageToken = response.GetNextPageToken(); page.PageToken == "" {
				return
			}
		}
	}
}

// CancelRequest cancels a request and returns it as it was. Operators can cancel any tenant's requests; where several
// tenants use one id, they name the tenant in a call of Client.Server.CancelRequest.
func (c *Client) CancelRequest(ctx context.Context, requestID string) (*icehousev1.RequestInfo, error) {
	response, err := c.Server.CancelRequest(ctx, &icehousev1.CancelRequestRequest{RequestId: requestID})
	return response.GetRequest(), err
}
