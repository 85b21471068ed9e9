package icehouse

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// unary gives a call its deadline, its headers, its retries and its typed error.
func (s *settings) unary(
	ctx context.Context, method string, request, reply any,
	conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption,
) error {
	ctx, cancel := s.bounded(ctx, s.timeoutOf(method))
	defer cancel()
	return sentAgain(ctx, s.retryLimitOf(method), func() error {
		return s.withToken(announced(ctx, request), func(ctx context.Context) error {
			return errorFrom(invoke(ctx, method, request, reply, conn, options...))
		})
	})
}

// stream does the same once the request is known, which gRPC shows to SendMsg only. Of the streaming
// calls Stream alone gets a deadline: the others have no end, or tell how far they are.
func (s *settings) stream(
	ctx context.Context, description *grpc.StreamDesc, conn *grpc.ClientConn, method string,
	begin grpc.Streamer, options ...grpc.CallOption,
) (grpc.ClientStream, error) {
	cancel := func() {}
	if method == icehousev1.InferenceService_Stream_FullMethodName {
		ctx, cancel = s.bounded(ctx, s.timeout)
	}
	return &announcedStream{
		settings: s,
		ctx:      ctx,
		cancel:   cancel,
		begin: func(ctx context.Context) (grpc.ClientStream, error) {
			return begin(ctx, description, conn, method, options...)
		},
	}, nil
}

// timeoutOf returns the deadline of a call with one answer.
func (s *settings) timeoutOf(method string) time.Duration {
	switch method {
	case icehousev1.CacheService_Warm_FullMethodName,
		icehousev1.CacheService_Evict_FullMethodName,
		icehousev1.CacheService_Verify_FullMethodName:
		if s.timeout != 0 {
			return s.orderTimeout
		}
	}
	return s.timeout
}

// bounded returns a context with a deadline, and what frees it.
func (s *settings) bounded(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if _, has := ctx.Deadline(); has || timeout == 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, timeout)
}

// announced returns a context that carries the prefix key of a request that has one.
func announced(ctx context.Context, request any) context.Context {
	if key := PrefixKey(request); key != "" {
		return metadata.AppendToOutgoingContext(ctx, PrefixKeyHeader, key)
	}
	return ctx
}

// announcedStream begins its call with the request, so that the request's headers go with it. The API's
// streams have one request each, sent by the generated stub before it returns.
type announcedStream struct {
	grpc.ClientStream

	settings *settings
	ctx      context.Context
	cancel   context.CancelFunc
	begin    func(context.Context) (grpc.ClientStream, error)

	request any
	token   string
	settled bool
}

func (a *announcedStream) SendMsg(request any) error {
	a.request = request
	err := a.send()
	if err != nil {
		a.cancel()
	}
	return err
}

func (a *announcedStream) RecvMsg(response any) error {
	err := errorFrom(a.ClientStream.RecvMsg(response))
	if err != nil && !a.settled && a.token != "" && a.settings.token.isRenewed(err, a.token) {
		a.settled = true
		if err = a.sendAgain(); err == nil {
			err = errorFrom(a.ClientStream.RecvMsg(response))
		}
	}
	a.settled = true
	if err != nil {
		a.cancel()
	}
	return err
}

func (a *announcedStream) send() error {
	ctx, token, err := a.settings.authorized(announced(a.ctx, a.request))
	if err != nil {
		return err
	}
	stream, err := a.begin(ctx)
	if err != nil {
		return errorFrom(err)
	}
	a.ClientStream, a.token = stream, token
	return errorFrom(stream.SendMsg(a.request))
}

// sendAgain begins the call anew with another token: the server refused the first, so nothing has run.
func (a *announcedStream) sendAgain() error {
	if err := a.send(); err != nil {
		return err
	}
	return errorFrom(a.ClientStream.CloseSend())
}
