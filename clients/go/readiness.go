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

// Times between two questions whether a server takes requests; each is twice the one before.
const (
	firstPollDelay = 100 * time.Millisecond
	lastPollDelay  = time.Second
)

// ErrEngineFailed is what WaitReady returns of a server that will take no request any more.
var ErrEngineFailed error = &Error{
	Code:    codes.Internal,
	Message: "the server's engine has failed; start it again",
	Reason:  "ENGINE_FAILED",
	status:  status.New(codes.Internal, "the server's engine has failed; start it again"),
}

// WaitReady returns once the server takes requests: it listens, be it yet to start, and its model is loaded. It
// waits until the end of ctx; where that has no deadline, as long as the client's calls have (120 s, see
// [WithTimeout]). Then it returns DeadlineExceeded with what came last in the message.
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
				return nil, ErrEngineFailed
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

func late(last string) error {
	message := fmt.Sprintf("the server was not ready in time: %s", last)
	return errorFrom(status.Error(codes.DeadlineExceeded, message))
}
