package icehouse

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// unary gives a call its deadline, its headers and its typed error.
func (s *settings) unary(
	ctx context.Context, method string, request, reply any,
	conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption,
) error {
	ctx, cancel := s.bounded(ctx, s.timeoutOf(method))
	defer cancel()
	err := invoke(s.announced(ctx, request), method, request, reply, conn, options...)
	return errorFrom(err)
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

// announced returns a context that carries the token, and the prefix key of a request that has one.
func (s *settings) announced(ctx context.Context, request any) context.Context {
	var headers []string
	if s.token != "" {
		headers = append(headers, "authorization", "Bearer "+s.token)
	}
	if key := PrefixKey(request); key != "" {
		headers = append(headers, PrefixKeyHeader, key)
	}
	return metadata.AppendToOutgoingContext(ctx, headers...)
}

// announcedStream begins its call with the request, so that the request's headers go with it. The API's
// streams have one request each, sent by the generated stub before it returns.
type announcedStream struct {
	grpc.ClientStream

	settings *settings
	ctx      context.Context
	cancel   context.CancelFunc
	begin    func(context.Context) (grpc.ClientStream, error)
}

func (a *announcedStream) SendMsg(request any) error {
	stream, err := a.begin(a.settings.announced(a.ctx, request))
	if err != nil {
		a.cancel()
		return errorFrom(err)
	}
	a.ClientStream = stream
	return errorFrom(stream.SendMsg(request))
}

func (a *announcedStream) RecvMsg(response any) error {
	err := a.ClientStream.RecvMsg(response)
	if err != nil {
		a.cancel()
	}
	return errorFrom(err)
}
