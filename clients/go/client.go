package icehouse

import (
	"context"
	_ "embed"
	"fmt"
	"math"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	// gRPC checks the health of servers only where this package is linked in.
	_ "google.golang.org/grpc/health"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// serviceConfig is the one that clients of all languages have: Generate, Embed and Rerank are retried when no server
// took them, and servers whose health check says that they do not serve are left out. A resolver's own config wins.
//
//go:embed service_config.json
var serviceConfig string

// Client is a connection to one server, or to all servers that a name resolves to. It is safe for concurrent use.
type Client struct {
	// The generated stubs of all services, over the same connection.
	Inference  icehousev1.InferenceServiceClient
	Cache      icehousev1.CacheServiceClient
	Models     icehousev1.ModelServiceClient
	Embeddings icehousev1.EmbeddingServiceClient
	Reranking  icehousev1.RerankServiceClient
	Server     icehousev1.ServerServiceClient

	conn     *grpc.ClientConn
	settings *settings
}

// Dial returns a client of the server at address: "host:port", "unix:/path" or any other gRPC target. It does not
// connect yet; the first call does.
func Dial(address string, options ...Option) (*Client, error) {
	settings := defaultSettings()
	for _, option := range options {
		option(&settings)
	}
	if strings.TrimSpace(address) == "" {
		return nil, fmt.Errorf(
			"icehouse: the address is %q; it must be host:port, such as localhost:50051, or unix:/path", address)
	}
	if settings.retryLimit < 0 {
		return nil, fmt.Errorf("icehouse: the retry limit is %d; it must be at least 0", settings.retryLimit)
	}
	transport := insecure.NewCredentials()
	if settings.tls != nil {
		transport = credentials.NewTLS(settings.tls)
	}
	own := []grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		grpc.WithDefaultServiceConfig(serviceConfig),
		// The tokens of a prompt, or a long output, may be larger than gRPC's default of 4 MB.
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32)),
		grpc.WithChainUnaryInterceptor(settings.unary),
		grpc.WithChainStreamInterceptor(settings.stream),
	}
	if isLocal(address) {
		own = append(own, grpc.WithNoProxy())
	}
	conn, err := grpc.NewClient(address, append(own, settings.dial...)...)
	if err != nil {
		return nil, fmt.Errorf("icehouse: %q is not an address: %w", address, err)
	}
	return &Client{
		Inference:  icehousev1.NewInferenceServiceClient(conn),
		Cache:      icehousev1.NewCacheServiceClient(conn),
		Models:     icehousev1.NewModelServiceClient(conn),
		Embeddings: icehousev1.NewEmbeddingServiceClient(conn),
		Reranking:  icehousev1.NewRerankServiceClient(conn),
		Server:     icehousev1.NewServerServiceClient(conn),
		conn:       conn,
		settings:   &settings,
	}, nil
}

// Close closes the connection and cancels the calls that run on it.
func (c *Client) Close() error {
	return c.conn.Close()
}

// Generate returns the whole output.
func (c *Client) Generate(
	ctx context.Context, request *icehousev1.GenerateRequest,
) (*icehousev1.GenerateResponse, error) {
	return c.Inference.Generate(ctx, request)
}

// Stream returns a running output. If the server refuses the request, the iteration yields the error. Leave the
// iteration, call [Stream.Close] or cancel ctx to end the output on the server too.
func (c *Client) Stream(ctx context.Context, request *icehousev1.GenerateRequest) *Stream {
	ctx, cancel := context.WithCancel(ctx)
	call, err := c.Inference.Stream(ctx, request)
	return &Stream{call: call, err: err, cancel: cancel}
}

// Tokenize returns the tokens of a prompt, exactly as Generate would see them. Prompts of tokens are refused.
func (c *Client) Tokenize(ctx context.Context, prompt *icehousev1.Prompt) ([]*icehousev1.Token, error) {
	response, err := c.Inference.Tokenize(ctx, &icehousev1.TokenizeRequest{Prompt: prompt})
	return response.GetTokens(), err
}

// Detokenize returns the text of tokens.
func (c *Client) Detokenize(ctx context.Context, ids ...int32) (string, error) {
	response, err := c.Inference.Detokenize(ctx, &icehousev1.DetokenizeRequest{TokenIds: ids})
	return response.GetText(), err
}

// Embed returns a vector for each input, in their order.
func (c *Client) Embed(
	ctx context.Context, request *icehousev1.EmbedRequest,
) (*icehousev1.EmbedResponse, error) {
	return c.Embeddings.Embed(ctx, request)
}

// Rerank returns the documents of the request, best first.
func (c *Client) Rerank(
	ctx context.Context, request *icehousev1.RerankRequest,
) (*icehousev1.RerankResponse, error) {
	return c.Reranking.Rerank(ctx, request)
}
