package icehouse

import (
	"context"
	"iter"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// pageSize is how many requests ListRequests is asked for at once.
const pageSize = 1000

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
