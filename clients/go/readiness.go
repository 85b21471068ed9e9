package icehouse

import (
	"context"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// Times between two polls. Each is twice the one before.
const (
	firstPollDelay = 100 * time.Millisecond
	lastPollDelay  = time.Second
)

// WaitReady returns once the server accepts requests: it has started and loaded its model. It waits until the deadline
// of ctx, or until the client's own (see [WithTimeout]) if ctx has none. Then it returns an error with the code
// DeadlineExceeded, whose message says what it was last waiting for. It returns at once if the server's engine has
// failed.
func (c *Client) WaitReady(ctx context.Context) (*icehousev1.Server, error) {
	ctx, cancel := c.settings.bounded(ctx, c.settings.timeout)
	defer cancel()
	last := "it has not answered"
	for delay := firstPollDelay; ; delay = min(2*delay, lastPollDelay) {
		response, err := c.Server.GetServer(ctx, &icehousev1.GetServerRequest{})
		switch status.Code(err) {
		case codes.OK:
			state := response.GetServer().GetState()
			switch state {
			case icehousev1.ServerState_SERVER_STATE_READY:
				return response.GetServer(), nil
			case icehousev1.ServerState_SERVER_STATE_FAILED:
				return nil, engineFailed()
			}
			last = "it is " + strings.TrimPrefix(state.String(), "SERVER_STATE_")
		case codes.Unavailable:
			last = strings.TrimPrefix(err.Error(), "icehouse: ")
		case codes.DeadlineExceeded:
			return nil, late(last)
		default:
			return nil, err
		}
		if err := sleep(ctx, delay); status.Code(err) == codes.DeadlineExceeded {
			return nil, late(last)
		} else if err != nil {
			return nil, err
		}
	}
}

func engineFailed() error {
	failed := status.New(codes.Internal, "the server's engine has failed; restart the server")
	return &Error{Code: failed.Code(), Message: failed.Message(), Reason: "ENGINE_FAILED", status: failed}
}

func late(last string) error {
	message := fmt.Sprintf("the server was not ready in time: %s", last)
	return errorFrom(status.Error(codes.DeadlineExceeded, message))
}
