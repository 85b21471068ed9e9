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

	// Health checks happen only where this is linked in.
	_ "google.golang.org/grpc/health"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// ServiceConfig is the published service config: Generate, Embed and Rerank are retried when no server took
// them, and servers that say they do not serve are passed over. A resolver that brings its own wins.
//
//go:embed service_config.json
var ServiceConfig string

// Client is a connection to one server, or to all that a name resolves to. Safe for concurrent use.
type Client struct {
	// The generated stubs of all services over this connection.
	Inference  icehousev1.InferenceServiceClient
	Cache      icehousev1.CacheServiceClient
	Models     icehousev1.ModelServiceClient
	Embeddings icehousev1.EmbeddingServiceClient
	Reranking  icehousev1.RerankServiceClient
	Server     icehousev1.ServerServiceClient

	conn     *grpc.ClientConn
	settings *settings
}

// Dial returns a client of the server at address: "host:port", "unix:/path" or any other gRPC target.
// It does not wait for the connection, which is made with the first call.
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
		return nil, fmt.Errorf("icehouse: the retry limit is %d, and must be at least 0", settings.retryLimit)
	}
	transport := insecure.NewCredentials()
	if settings.tls != nil {
		transport = credentials.NewTLS(settings.tls)
	}
	own := []grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		grpc.WithDefaultServiceConfig(ServiceConfig),
		// A prompt's tokens or a long output may pass gRPC's 4 MB.
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32)),
		grpc.WithChainUnaryInterceptor(settings.unary),
		grpc.WithChainStreamInterceptor(settings.stream),
	}
	if isLocal(address) {
		own = append(own, grpc.WithNoProxy())
	}
	conn, err := grpc.NewClient(address, append(own, settings.dial...)...)
	if err != nil {
		return nil, fmt.Errorf("icehouse: %q is no address: %w", address, err)
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

// Close ends the connection and what runs on it.
func (c *Client) Close() error {
	return c.conn.Close()
}

// Generate returns the whole output. Retried while no server takes it, until the deadline.
func (c *Client) Generate(
	ctx context.Context, request *icehousev1.GenerateRequest,
) (*icehousev1.GenerateResponse, error) {
	return c.Inference.Generate(ctx, request)
}

// Stream begins an output that comes piece by piece; a refusal is what its iteration yields. Never
// retried. Close it, or end ctx, to end it on the server too.
func (c *Client) Stream(ctx context.Context, request *icehousev1.GenerateRequest) *Stream {
	ctx, cancel := context.WithCancel(ctx)
	call, err := c.Inference.Stream(ctx, request)
	return &Stream{call: call, err: err, cancel: cancel}
}
