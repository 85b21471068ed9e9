package icehouse

import (
	"context"
	"crypto/tls"
	"time"

	"google.golang.org/grpc"
)

// DefaultTimeout is the deadline of a call whose context has none.
const DefaultTimeout = 120 * time.Second

// DefaultOrderTimeout is the deadline of Warm, Evict and Verify whose context has none: a long prompt or a
// large disk takes its time.
const DefaultOrderTimeout = time.Hour

// Option says something about a connection.
type Option func(*settings)

type settings struct {
	timeout      time.Duration
	orderTimeout time.Duration
	retryLimit   int
	token        *bearerToken
	tls          *tls.Config
	dial         []grpc.DialOption
}

func defaultSettings() settings {
	return settings{timeout: DefaultTimeout, orderTimeout: DefaultOrderTimeout}
}

// WithTLS secures the connection. An empty config trusts the system's authorities; RootCAs names others,
// Certificates prove who the client is (mTLS), ServerName is expected when it differs from the address.
func WithTLS(config *tls.Config) Option {
	return func(s *settings) { s.tls = config }
}

// WithToken sends a bearer token with every call. Without TLS whoever is on the way can read it.
func WithToken(token string) Option {
	return func(s *settings) { s.token = &bearerToken{known: token} }
}

// WithTokenSource sends the token that source returns. It is kept until the server refuses it (Unauthenticated);
// then source is asked anew, and the refused call, of which nothing has run, is made again, once. One call at a
// time asks it.
func WithTokenSource(source func(context.Context) (string, error)) Option {
	return func(s *settings) { s.token = &bearerToken{source: source} }
}

// WithTimeout sets the deadline of calls whose context has none, in place of [DefaultTimeout]. 0 is none, for
// Warm, Evict and Verify too.
func WithTimeout(timeout time.Duration) Option {
	return func(s *settings) { s.timeout = timeout }
}

// WithOrderTimeout sets the deadline of Warm, Evict and Verify whose context has none, in place of
// [DefaultOrderTimeout]. 0 is none.
func WithOrderTimeout(timeout time.Duration) Option {
	return func(s *settings) { s.orderTimeout = timeout }
}

// WithRetryLimit sends Generate, Embed and Rerank again, at most so often, where the server refuses them for now
// and says when to come back ([Error.RetryAfter]), but never past the call's deadline. Without it the refusal
// is returned.
func WithRetryLimit(count int) Option {
	return func(s *settings) { s.retryLimit = count }
}

// WithoutHealthChecks uses servers whatever their health says: for those that answer health checks only to
// callers with credentials, which gRPC does not send with them.
func WithoutHealthChecks() Option {
	return WithDialOptions(grpc.WithDisableHealthCheck())
}

// WithDialOptions adds gRPC's own options, such as interceptors for tracing. They are applied last.
func WithDialOptions(options ...grpc.DialOption) Option {
	return func(s *settings) { s.dial = append(s.dial, options...) }
}
