package icehouse

import (
	"context"
	"errors"
	"iter"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// pageSize is how many requests ListRequests is asked for at once.
const pageSize = 1000

// pollInterval is the time between two questions whether a server that listens takes requests.
const pollInterval = 100 * time.Millisecond

// ErrEngineFailed is what WaitReady returns of a server that will take no request any more.
var ErrEngineFailed = errors.New("icehouse: the server's engine has failed; start it again")

// WaitReady returns once the server takes requests: it listens and its model is loaded. It waits until the end
// of ctx; where that has no deadline, as long as the client's calls have (120 s, see [WithTimeout]).
func (c *Client) WaitReady(ctx context.Context) (*icehousev1.Server, error) {
	ctx, cancel := c.settings.bounded(ctx, c.settings.timeout)
	defer cancel()
	for {
		response, err := c.Server.GetServer(ctx, &icehousev1.GetServerRequest{}, grpc.WaitForReady(true))
		if err != nil && status.Code(err) != codes.Unavailable {
			return nil, err
		}
		switch response.GetServer().GetState() {
		case icehousev1.ServerState_SERVER_STATE_READY:
			return response.GetServer(), nil
		case icehousev1.ServerState_SERVER_STATE_FAILED:
			return nil, ErrEngineFailed
		}
		if err := sleep(ctx, pollInterval); err != nil {
			return nil, err
		}
	}
}

// GetServer returns the server's version, state, features and limits.
func (c *Client) GetServer(ctx context.Context) (*icehousev1.Server, error) {
	response, err := c.Server.GetServer(ctx, &icehousev1.GetServerRequest{})
	return response.GetServer(), err
}

// ListRequests yields the requests that wait or run, the oldest first: the caller's tenant's, all of them
// for operators. An error is the last thing that comes.
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

// CancelRequest ends a request by its id, another caller's too for operators, and returns what it was.
func (c *Client) CancelRequest(ctx context.Context, requestID string) (*icehousev1.RequestInfo, error) {
	response, err := c.Server.CancelRequest(ctx, &icehousev1.CancelRequestRequest{RequestId: requestID})
	return response.GetRequest(), err
}

// CancelRequestOf ends a request of a tenant, for operators: several tenants may have requests of one id, and
// one of them must then be named.
func (c *Client) CancelRequestOf(ctx context.Context, tenant, requestID string) (*icehousev1.RequestInfo, error) {
	request := &icehousev1.CancelRequestRequest{RequestId: requestID, Tenant: &tenant}
	response, err := c.Server.CancelRequest(ctx, request)
	return response.GetRequest(), err
}

// Tokenize returns the tokens of a text.
func (c *Client) Tokenize(ctx context.Context, text string) ([]*icehousev1.Token, error) {
	request := &icehousev1.TokenizeRequest{Prompt: &icehousev1.TokenizeRequest_Text{Text: text}}
	response, err := c.Inference.Tokenize(ctx, request)
	return response.GetTokens(), err
}

// Detokenize returns the text of tokens.
func (c *Client) Detokenize(ctx context.Context, ids ...int32) (string, error) {
	response, err := c.Inference.Detokenize(ctx, &icehousev1.DetokenizeRequest{TokenIds: ids})
	return response.GetText(), err
}

// Embed returns a vector for each input of the request, in their order, and what they cost. Retried while
// no server takes it.
func (c *Client) Embed(
	ctx context.Context, request *icehousev1.EmbedRequest,
) (*icehousev1.EmbedResponse, error) {
	return c.Embeddings.Embed(ctx, request)
}

// Rerank returns the request's documents, best first, and what they cost. Retried while no server takes it.
func (c *Client) Rerank(
	ctx context.Context, request *icehousev1.RerankRequest,
) (*icehousev1.RerankResponse, error) {
	return c.Reranking.Rerank(ctx, request)
}
