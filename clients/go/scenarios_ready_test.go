package icehouse

import (
	"context"
	"strings"
	"testing"
	"time"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

func testWaitReady(t *testing.T, s scenario) {
	s.checkReady(t, s.client(t))
}

func testWaitReadyComing(t *testing.T, s scenario) {
	client := s.client(t)
	s.checkRefused(t, end(client.Stream(t.Context(), s.request())))
	s.checkReady(t, client)
}

func testWaitReadyLate(t *testing.T, s scenario) {
	_, err := s.waitReady(t, s.client(t))
	late := s.checkRefused(t, err)
	_, has := late.RetryAfter()
	if !strings.Contains(late.Message, s.Expect.MessagePart) || late.Field != "" || len(late.Metadata) > 0 || has {
		t.Errorf("%+v", late)
	}
}

func (s scenario) waitReady(t *testing.T, client *Client) (*icehousev1.Server, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Duration(s.Input.TimeoutMS)*time.Millisecond)
	defer cancel()
	return client.WaitReady(ctx)
}

func (s scenario) checkReady(t *testing.T, client *Client) {
	t.Helper()
	server, err := s.waitReady(t, client)
	if err != nil || server.GetState().String() != "SERVER_STATE_"+s.Expect.State {
		t.Error(server, err)
	}
}
