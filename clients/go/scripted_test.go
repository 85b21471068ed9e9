package icehouse

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// scripted is a server that refuses as often as its script says, which a real one cannot be made to do.
type scripted struct {
	icehousev1.UnimplementedInferenceServiceServer
	icehousev1.UnimplementedCacheServiceServer
	icehousev1.UnimplementedRerankServiceServer
	icehousev1.UnimplementedServerServiceServer

	mutex       sync.Mutex
	refusals    int
	refusal     error
	generations int
	streams     int
	deadline    bool
	remaining   time.Duration
	headers     metadata.MD
	text        string
	request     *icehousev1.GenerateRequest
	events      []*icehousev1.WarmResponse
	// states are the answers of GetServer, one per call; the last one is repeated.
	states []icehousev1.ServerState
	asked  int
}

func (s *scripted) take(ctx context.Context, count *int) error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	*count++
	s.headers, _ = metadata.FromIncomingContext(ctx)
	var deadline time.Time
	deadline, s.deadline = ctx.Deadline()
	s.remaining = time.Until(deadline).Round(time.Minute)
	if s.refusals == 0 {
		return nil
	}
	s.refusals--
	return s.refusal
}

func (s *scripted) Generate(
	ctx context.Context, request *icehousev1.GenerateRequest,
) (*icehousev1.GenerateResponse, error) {
	if err := s.take(ctx, &s.generations); err != nil {
		return nil, err
	}
	s.request = request
	return &icehousev1.GenerateResponse{
		Text: cmp.Or(s.text, "done"), FinishReason: icehousev1.FinishReason_FINISH_REASON_STOP_TOKEN,
	}, nil
}

func (s *scripted) Stream(
	_ *icehousev1.GenerateRequest, stream grpc.ServerStreamingServer[icehousev1.StreamResponse],
) error {
	return s.take(stream.Context(), &s.streams)
}

// Warm sends the events of the script.
func (s *scripted) Warm(
	_ *icehousev1.WarmRequest, stream grpc.ServerStreamingServer[icehousev1.WarmResponse],
) error {
	if err := s.take(stream.Context(), new(int)); err != nil {
		return err
	}
	for _, event := range s.events {
		if err := stream.Send(event); err != nil {
			return err
		}
	}
	return nil
}

func (s *scripted) Evict(
	_ *icehousev1.EvictRequest, stream grpc.ServerStreamingServer[icehousev1.EvictResponse],
) error {
	if err := s.take(stream.Context(), new(int)); err != nil {
		return err
	}
	result := &icehousev1.EvictResult{RamBlockCount: 1}
	return stream.Send(&icehousev1.EvictResponse{Event: &icehousev1.EvictResponse_Done{Done: result}})
}

func (s *scripted) EvictAll(
	_ *icehousev1.EvictAllRequest, stream grpc.ServerStreamingServer[icehousev1.EvictAllResponse],
) error {
	if err := s.take(stream.Context(), new(int)); err != nil {
		return err
	}
	result := &icehousev1.EvictResult{RamBlockCount: 3}
	return stream.Send(&icehousev1.EvictAllResponse{Event: &icehousev1.EvictAllResponse_Done{Done: result}})
}

func (s *scripted) Import(
	stream grpc.ClientStreamingServer[icehousev1.ImportRequest, icehousev1.ImportResponse],
) error {
	if err := s.take(stream.Context(), new(int)); err != nil {
		return err
	}
	answer := &icehousev1.ImportResponse{}
	for {
		request, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return stream.SendAndClose(answer)
		}
		if err != nil {
			return err
		}
		answer.AdoptedBytes += int64(len(request.GetChunk()))
	}
}

func (s *scripted) WatchStats(
	_ *icehousev1.WatchStatsRequest, stream grpc.ServerStreamingServer[icehousev1.WatchStatsResponse],
) error {
	return s.take(stream.Context(), new(int))
}

func (s *scripted) Rerank(ctx context.Context, _ *icehousev1.RerankRequest) (*icehousev1.RerankResponse, error) {
	return &icehousev1.RerankResponse{}, s.take(ctx, new(int))
}

func (s *scripted) GetServer(
	ctx context.Context, _ *icehousev1.GetServerRequest,
) (*icehousev1.GetServerResponse, error) {
	if err := s.take(ctx, &s.asked); err != nil {
		return nil, err
	}
	state := s.states[0]
	if len(s.states) > 1 {
		s.states = s.states[1:]
	}
	return &icehousev1.GetServerResponse{Server: &icehousev1.Server{Version: "1.2.3", State: state}}, nil
}

// standing is a health service that always answers the same. (gRPC's own would link in the health checks, which the
// client must link in itself.)
type standing struct {
	grpc_health_v1.UnimplementedHealthServer

	status grpc_health_v1.HealthCheckResponse_ServingStatus
}

func (s standing) Watch(
	_ *grpc_health_v1.HealthCheckRequest, stream grpc.ServerStreamingServer[grpc_health_v1.HealthCheckResponse],
) error {
	if err := stream.Send(&grpc_health_v1.HealthCheckResponse{Status: s.status}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return stream.Context().Err()
}

// serve starts a server with this script and returns a client of it.
func serve(t *testing.T, script *scripted, options ...Option) *Client {
	t.Helper()
	return serveAs(t, script, grpc_health_v1.HealthCheckResponse_SERVING, options...)
}

func serveAs(
	t *testing.T, script *scripted, status grpc_health_v1.HealthCheckResponse_ServingStatus, options ...Option,
) *Client {
	t.Helper()
	listener := listen(t)
	serveOn(t, listener, script, status)
	return dial(t, listener.Addr().String(), options...)
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	return listener
}

func serveOn(
	t *testing.T, listener net.Listener, script *scripted, status grpc_health_v1.HealthCheckResponse_ServingStatus,
) {
	t.Helper()
	server := grpc.NewServer()
	icehousev1.RegisterInferenceServiceServer(server, script)
	icehousev1.RegisterCacheServiceServer(server, script)
	icehousev1.RegisterRerankServiceServer(server, script)
	icehousev1.RegisterServerServiceServer(server, script)
	grpc_health_v1.RegisterHealthServer(server, standing{status: status})
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
}

func unavailable() error {
	return status.Error(codes.Unavailable, "draining")
}

func TestGenerateIsRetriedWhileUnavailable(t *testing.T) {
	script := &scripted{refusals: 2, refusal: unavailable()}
	client := serve(t, script)
	response, err := client.Generate(t.Context(), &icehousev1.GenerateRequest{Prompt: Text("Hi")})
	if err != nil || response.GetText() != "done" {
		t.Fatal(response, err)
	}
	if script.generations != 3 {
		t.Errorf("tried %d times, not 3", script.generations)
	}
}

func TestNothingElseIsRetried(t *testing.T) {
	script := &scripted{refusals: 1, refusal: status.Error(codes.ResourceExhausted, "full")}
	client := serve(t, script)
	if _, err := client.Generate(t.Context(), &icehousev1.GenerateRequest{}); err == nil {
		t.Error("a refusal got lost")
	}
	script.refusals, script.refusal = 1, unavailable()
	for _, err := range client.Stream(t.Context(), &icehousev1.GenerateRequest{}).Texts() {
		if status.Code(err) != codes.Unavailable {
			t.Error(err)
		}
	}
	if script.generations != 1 || script.streams != 1 {
		t.Errorf("Generate was tried %d times, Stream %d times", script.generations, script.streams)
	}
}

func TestAServerThatDoesNotServeIsNotCalled(t *testing.T) {
	script := &scripted{}
	client := serveAs(t, script, grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	stream := client.Stream(t.Context(), &icehousev1.GenerateRequest{})
	for range stream.Texts() {
	}
	if _, err := stream.Reply(); status.Code(err) != codes.Unavailable || script.streams != 0 {
		t.Errorf("called %d times: %v", script.streams, err)
	}
}

func TestHealthCanBeLeftAlone(t *testing.T) {
	script := &scripted{}
	client := serveAs(t, script, grpc_health_v1.HealthCheckResponse_NOT_SERVING, WithoutHealthChecks())
	if _, err := client.Generate(t.Context(), &icehousev1.GenerateRequest{}); err != nil || script.generations != 1 {
		t.Errorf("called %d times: %v", script.generations, err)
	}
}

func TestARetryDelayIsToldInTheError(t *testing.T) {
	full, err := status.New(codes.ResourceExhausted, "full").WithDetails(
		&errdetails.ErrorInfo{Reason: "QUEUE_FULL", Metadata: map[string]string{"waiting": "8"}},
		&errdetails.RetryInfo{RetryDelay: durationpb.New(1500 * time.Millisecond)},
	)
	if err != nil {
		t.Fatal(err)
	}
	client := serve(t, &scripted{refusals: 1, refusal: full.Err()})
	_, err = client.Generate(t.Context(), &icehousev1.GenerateRequest{})
	var refused *Error
	if !errors.As(err, &refused) {
		t.Fatalf("%v is no *Error", err)
	}
	delay, is := refused.RetryAfter()
	if !is || delay != 1500*time.Millisecond || refused.Reason != "QUEUE_FULL" || refused.Metadata["waiting"] != "8" {
		t.Errorf("%+v", refused)
	}
}

func TestEveryCallHasADeadlineUnlessToldOtherwise(t *testing.T) {
	for _, test := range []struct {
		options []Option
		want    bool
	}{{nil, true}, {[]Option{WithTimeout(0)}, false}} {
		script := &scripted{}
		client := serve(t, script, test.options...)
		if _, err := client.Generate(t.Context(), &icehousev1.GenerateRequest{}); err != nil {
			t.Fatal(err)
		}
		if script.deadline != test.want {
			t.Errorf("Generate has a deadline: %t", script.deadline)
		}
		for _, err := range client.Stream(t.Context(), &icehousev1.GenerateRequest{}).Events() {
			t.Error(err)
		}
		if script.deadline != test.want {
			t.Errorf("Stream has a deadline: %t", script.deadline)
		}
	}
}

func TestCommandsHaveALongerDeadline(t *testing.T) {
	for _, test := range []struct {
		options []Option
		want    time.Duration
	}{
		{nil, CommandTimeout},
		{[]Option{WithTimeout(30 * time.Minute)}, CommandTimeout},
		{[]Option{WithTimeout(0)}, 0},
	} {
		script := &scripted{events: []*icehousev1.WarmResponse{warmed("r")}}
		client := serve(t, script, test.options...)
		check := func(err error) {
			t.Helper()
			if err != nil || script.deadline != (test.want != 0) || (script.deadline && script.remaining != test.want) {
				t.Errorf("%v %v, not %v: %v", script.deadline, script.remaining, test.want, err)
			}
		}
		_, err := client.Warm(t.Context(), &icehousev1.WarmRequest{Prompt: Text("Once")})
		check(err)
		_, err = client.EvictAll(t.Context(), &icehousev1.EvictAllRequest{})
		check(err)
	}
}

func TestAnUploadIsOneCallWithManyRequests(t *testing.T) {
	script := &scripted{}
	client := serve(t, script, WithToken("blue"))
	upload, err := client.Cache.Import(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		part := &icehousev1.ImportRequest_Chunk{Chunk: []byte("chunk")}
		if err := upload.Send(&icehousev1.ImportRequest{Part: part}); err != nil {
			t.Fatal(err)
		}
	}
	answer, err := upload.CloseAndRecv()
	token := strings.Join(script.headers.Get("authorization"), ",")
	if err != nil || answer.GetAdoptedBytes() != 15 || token != "Bearer blue" || script.remaining != CommandTimeout {
		t.Error(err, answer, token, script.remaining)
	}
}

func TestAWatchHasNoDeadline(t *testing.T) {
	script := &scripted{}
	for _, err := range serve(t, script).WatchStats(t.Context(), 0) {
		t.Error(err)
	}
	if script.headers == nil || script.deadline {
		t.Error(script.headers, script.remaining)
	}
}

func warmed(requestID string) *icehousev1.WarmResponse {
	result := &icehousev1.WarmResult{RequestId: requestID}
	return &icehousev1.WarmResponse{Event: &icehousev1.WarmResponse_Done{Done: result}}
}

func warming(tokens int32) *icehousev1.WarmResponse {
	progress := &icehousev1.WarmProgress{ProcessedTokens: tokens}
	return &icehousev1.WarmResponse{Event: &icehousev1.WarmResponse_Progress{Progress: progress}}
}

func TestACommandTellsItsProgressAndReturnsItsResult(t *testing.T) {
	// The second event is of a kind that this client does not know.
	script := &scripted{events: []*icehousev1.WarmResponse{warming(1), {}, warming(2), warmed("r")}}
	client := serve(t, script)
	var steps []int32
	result, err := client.Warm(t.Context(), &icehousev1.WarmRequest{}, func(progress *icehousev1.WarmProgress) {
		steps = append(steps, progress.GetProcessedTokens())
	})
	if err != nil || result.GetRequestId() != "r" || !slices.Equal(steps, []int32{1, 2}) {
		t.Error(result, steps, err)
	}
	for _, progress := range [][]func(*icehousev1.WarmProgress){nil, {nil}} {
		result, err := client.Warm(t.Context(), &icehousev1.WarmRequest{}, progress...)
		if err != nil || result.GetRequestId() != "r" {
			t.Error(result, err)
		}
	}
}

func TestACommandWithoutAResultHasFailed(t *testing.T) {
	client := serve(t, &scripted{events: []*icehousev1.WarmResponse{warming(1)}})
	if result, err := client.Warm(t.Context(), &icehousev1.WarmRequest{}); refusal(t, err).Code != codes.Internal {
		t.Error(result, err)
	}
}

func TestTheHeadersGoWithBothCalls(t *testing.T) {
	script := &scripted{}
	client := serve(t, script, WithToken("secret"))
	request := &icehousev1.GenerateRequest{Prompt: Text("Once upon a time")}
	check := func() {
		t.Helper()
		key, token := script.headers.Get(PrefixKeyHeader), script.headers.Get("authorization")
		if len(key) != 1 || key[0] != PrefixKey(request) || len(token) != 1 || token[0] != "Bearer secret" {
			t.Error(script.headers)
		}
		script.headers = nil
	}
	if _, err := client.Generate(t.Context(), request); err != nil {
		t.Fatal(err)
	}
	check()
	for _, err := range client.Stream(t.Context(), request).Texts() {
		t.Error(err)
	}
	check()
}

func TestThePrefixKeyGoesWithEveryCallWhoseCacheItConcerns(t *testing.T) {
	script := &scripted{events: []*icehousev1.WarmResponse{warmed("r")}}
	client := serve(t, script)
	check := func(err error, want string) {
		t.Helper()
		if key := script.headers.Get(PrefixKeyHeader); err != nil || strings.Join(key, ",") != want {
			t.Error(key, want, err)
		}
	}
	wanted := PrefixKey(&icehousev1.GenerateRequest{Prompt: Text("Once")})
	_, err := client.Warm(t.Context(), &icehousev1.WarmRequest{Prompt: Text("Once")})
	check(err, wanted)
	_, err = client.Evict(t.Context(), &icehousev1.EvictRequest{Prompt: Text("Once")})
	check(err, wanted)
	_, err = client.EvictAll(t.Context(), &icehousev1.EvictAllRequest{})
	check(err, "")
	ranked := &icehousev1.RerankRequest{Query: "Which?", Documents: []string{"a"}}
	_, err = client.Reranking.Rerank(t.Context(), ranked)
	check(err, PrefixKey(ranked))
}

func TestAStreamCutShortHasNoReply(t *testing.T) {
	client := serve(t, &scripted{})
	stream := client.Stream(t.Context(), &icehousev1.GenerateRequest{})
	for _, err := range stream.Texts() {
		t.Error(err)
	}
	if _, err := stream.Reply(); !errors.Is(err, ErrNotEnded) {
		t.Error(err)
	}
}
