package icehouse

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// unary gives a call its deadline, headers, retries and typed error.
func (s *settings) unary(
	ctx context.Context, method string, request, reply any,
	conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption,
) error {
	ctx, cancel := s.bounded(ctx, s.timeoutOf(method))
	defer cancel()
	return retry(ctx, s.retryLimitOf(method), func() error {
		return s.withToken(withPrefixKey(ctx, request), func(ctx context.Context) error {
			return errorFrom(invoke(ctx, method, request, reply, conn, options...))
		})
	})
}

// stream gives a streaming call its deadline, headers and typed error.
func (s *settings) stream(
	ctx context.Context, description *grpc.StreamDesc, conn *grpc.ClientConn, method string,
	begin grpc.Streamer, options ...grpc.CallOption,
) (grpc.ClientStream, error) {
	ctx, cancel := s.bounded(ctx, s.timeoutOf(method))
	if description.ClientStreams && !description.ServerStreams {
		return s.upload(ctx, cancel, func(ctx context.Context) (grpc.ClientStream, error) {
			return begin(ctx, description, conn, method, options...)
		})
	}
	return &deferredStream{
		settings: s,
		ctx:      ctx,
		cancel:   cancel,
		begin: func(ctx context.Context) (grpc.ClientStream, error) {
			return begin(ctx, description, conn, method, options...)
		},
	}, nil
}

// upload begins a call of many requests. It is not made again: what was sent is not kept.
func (s *settings) upload(
	ctx context.Context, cancel context.CancelFunc, begin func(context.Context) (grpc.ClientStream, error),
) (grpc.ClientStream, error) {
	ctx, _, err := s.authorized(ctx)
	if err != nil {
		cancel()
		return nil, err
	}
	stream, err := begin(ctx)
	if err != nil {
		cancel()
		return nil, errorFrom(err)
	}
	return &uploadStream{stream, cancel}, nil
}

// uploadStream ends with its one answer.
type uploadStream struct {
	grpc.ClientStream

	cancel context.CancelFunc
}

func (u *uploadStream) RecvMsg(response any) error {
	defer u.cancel()
	return errorFrom(u.ClientStream.RecvMsg(response))
}

// timeoutOf returns the deadline of a call whose context has none; 0 is none.
func (s *settings) timeoutOf(method string) time.Duration {
	switch method {
	case icehousev1.ServerService_WatchStats_FullMethodName:
		return 0
	case icehousev1.CacheService_Warm_FullMethodName,
		icehousev1.CacheService_Evict_FullMethodName,
		icehousev1.CacheService_EvictAll_FullMethodName,
		icehousev1.CacheService_Verify_FullMethodName,
		icehousev1.CacheService_Export_FullMethodName,
		icehousev1.CacheService_Import_FullMethodName:
		if s.timeout != 0 {
			return CommandTimeout
		}
	}
	return s.timeout
}

// bounded returns a context with a deadline, and its cancel function.
func (s *settings) bounded(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if _, has := ctx.Deadline(); has || timeout == 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, timeout)
}

// withPrefixKey returns a context that carries the prefix key of a request, if it has one.
func withPrefixKey(ctx context.Context, request any) context.Context {
	if key := PrefixKey(request); key != "" {
		return metadata.AppendToOutgoingContext(ctx, PrefixKeyHeader, key)
	}
	return ctx
}

// deferredStream is a stream that begins when its request is sent, because the headers depend on the request and gRPC
// shows it only to SendMsg. All streams but Import have one request, which the generated stub sends before it returns.
type deferredStream struct {
	grpc.ClientStream

	settings *settings
	ctx      context.Context
	cancel   context.CancelFunc
	begin    func(context.Context) (grpc.ClientStream, error)

	request any
	token   string
	// answered is set once the server has taken or refused the call.
	answered bool
}

func (d *deferredStream) SendMsg(request any) error {
	d.request = request
	err := d.send()
	if err != nil {
		d.cancel()
	}
	return err
}

func (d *deferredStream) RecvMsg(response any) error {
	err := errorFrom(d.ClientStream.RecvMsg(response))
	if err != nil && !d.answered && d.token != "" && d.settings.token.renew(err, d.token) {
		if err = d.sendAgain(); err == nil {
			err = errorFrom(d.ClientStream.RecvMsg(response))
		}
	}
	d.answered = true
	if err != nil {
		d.cancel()
	}
	return err
}

func (d *deferredStream) send() error {
	ctx, token, err := d.settings.authorized(withPrefixKey(d.ctx, d.request))
	if err != nil {
		return err
	}
	stream, err := d.begin(ctx)
	if err != nil {
		return errorFrom(err)
	}
	d.ClientStream, d.token = stream, token
	return errorFrom(stream.SendMsg(d.request))
}

// sendAgain repeats the call with another token. The server refused the first one, so nothing has run.
func (d *deferredStream) sendAgain() error {
	if err := d.send(); err != nil {
		return err
	}
	return errorFrom(d.ClientStream.CloseSend())
}
