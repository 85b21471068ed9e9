package icehouse

import (
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
	token        string
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
	return func(s *settings) { s.token = token }
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

// WithoutHealthChecks uses servers whatever their health says: for those that answer health checks only to
// callers with credentials, which gRPC does not send with them.
func WithoutHealthChecks() Option {
	return WithDialOptions(grpc.WithDisableHealthCheck())
}

// WithDialOptions adds gRPC's own options, such as interceptors for tracing. They are applied last.
func WithDialOptions(options ...grpc.DialOption) Option {
	return func(s *settings) { s.dial = append(s.dial, options...) }
}
