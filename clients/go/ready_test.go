package icehouse

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

const (
	loading = icehousev1.ServerState_SERVER_STATE_LOADING
	ready   = icehousev1.ServerState_SERVER_STATE_READY
	failed  = icehousev1.ServerState_SERVER_STATE_FAILED
)

func TestAServerIsWaitedForUntilItTakesRequests(t *testing.T) {
	script := &scripted{refusals: 1, refusal: unavailable(), states: []icehousev1.ServerState{loading, ready}}
	server, err := serve(t, script).WaitReady(t.Context())
	if err != nil || server.GetVersion() != "1.2.3" || script.asked != 3 {
		t.Error(server, err, script.asked)
	}
}

func TestAServerThatIsYetToComeIsWaitedFor(t *testing.T) {
	listener := listen(t)
	client := dial(t, listener.Addr().String())
	answered := make(chan error)
	go func() {
		_, err := client.WaitReady(t.Context())
		answered <- err
	}()
	// Nobody has accepted its connection so far.
	script := &scripted{states: []icehousev1.ServerState{ready}}
	serveOn(t, listener, script, grpc_health_v1.HealthCheckResponse_SERVING)
	if err := <-answered; err != nil {
		t.Error(err)
	}
}

func TestTheWaitEndsWithItsContext(t *testing.T) {
	for last, client := range map[string]*Client{
		"it is LOADING":         serve(t, &scripted{states: []icehousev1.ServerState{loading}}),
		"UNAVAILABLE: draining": serve(t, &scripted{refusals: 999, refusal: unavailable()}),
		"it has not answered":   dial(t, listen(t).Addr().String()),
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		_, err := client.WaitReady(ctx)
		cancel()
		if late := refusal(t, err); late.Code != codes.DeadlineExceeded || !strings.HasSuffix(late.Message, ": "+last) {
			t.Error(last, err)
		}
	}
}

func TestTheWaitEndsWithTheClientsTimeout(t *testing.T) {
	client := serve(t, &scripted{states: []icehousev1.ServerState{loading}}, WithTimeout(50*time.Millisecond))
	if _, err := client.WaitReady(context.Background()); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

func TestWhatWaitingCannotHelpIsToldAtOnce(t *testing.T) {
	script := &scripted{states: []icehousev1.ServerState{loading, failed}}
	_, err := serve(t, script).WaitReady(t.Context())
	if found := refusal(t, err); found.ErrorReason() != icehousev1.ErrorReason_ERROR_REASON_ENGINE_FAILED {
		t.Error(err)
	}
	script = &scripted{refusals: 9, refusal: status.Error(codes.Unauthenticated, "who are you?")}
	if _, err := serve(t, script).WaitReady(t.Context()); status.Code(err) != codes.Unauthenticated || script.asked != 1 {
		t.Error(err, script.asked)
	}
}
