package icehouse

import (
	"context"
	"crypto/tls"
	"time"

	"google.golang.org/grpc"
)

const (
	// DefaultTimeout is the deadline of calls whose context has none.
	DefaultTimeout = 120 * time.Second

	// CommandTimeout is the same for Warm, Evict, EvictAll, Verify, Export and Import, which may take minutes.
	CommandTimeout = time.Hour
)

// Option configures a [Client].
type Option func(*settings)

type settings struct {
	timeout    time.Duration
	retryLimit int
	token      *bearerToken
	tls        *tls.Config
	dial       []grpc.DialOption
}

func defaultSettings() settings {
	return settings{timeout: DefaultTimeout}
}

// WithTLS secures the connection. An empty config trusts the system's certificate authorities. Set RootCAs to trust
// others, Certificates for mTLS, and ServerName where the server's name differs from the address.
func WithTLS(config *tls.Config) Option {
	return func(s *settings) { s.tls = config }
}

// WithToken sends a bearer token with every call. Use it with [WithTLS]: otherwise the token is sent unencrypted.
func WithToken(token string) Option {
	return func(s *settings) { s.token = &bearerToken{known: token} }
}

// WithTokenSource sends the token that source returns with every call. The token is kept until the server refuses it
// (Unauthenticated). Then source is called again, and the refused call is repeated once with the new token. Source is
// never called twice at the same time.
func WithTokenSource(source func(context.Context) (string, error)) Option {
	return func(s *settings) { s.token = &bearerToken{source: source} }
}

// WithTimeout replaces [DefaultTimeout]. With 0 no call gets a deadline, not even the commands that otherwise have
// [CommandTimeout].
func WithTimeout(timeout time.Duration) Option {
	return func(s *settings) { s.timeout = timeout }
}

// WithRetryLimit repeats Generate, Embed and Rerank up to count times when the server refuses them for now and says
// when to try again (see [Error.RetryAfter]), but never past the call's deadline. Default: 0.
func WithRetryLimit(count int) Option {
	return func(s *settings) { s.retryLimit = count }
}

// WithoutHealthChecks uses servers whatever their health checks say. It is for servers that answer health checks only
// to authenticated callers: gRPC sends them without credentials.
func WithoutHealthChecks() Option {
	return WithDialOptions(grpc.WithDisableHealthCheck())
}

// WithDialOptions adds gRPC's own options, such as interceptors for tracing. They are applied last.
func WithDialOptions(options ...grpc.DialOption) Option {
	return func(s *settings) { s.dial = append(s.dial, options...) }
}
