package icehouse

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// delaySpread is the share by which a delay is made longer at most, so that those who were refused together
// come one by one.
const delaySpread = 0.25

// retryLimitOf returns how often a call is sent again that is refused for now.
func (s *settings) retryLimitOf(method string) int {
	switch method {
	case icehousev1.InferenceService_Generate_FullMethodName,
		icehousev1.EmbeddingService_Embed_FullMethodName,
		icehousev1.RerankService_Rerank_FullMethodName:
		return s.retryLimit
	}
	return 0
}

// sentAgain calls attempt until it is not refused for now, at most limit times more than once, and never past
// the context's deadline.
func sentAgain(ctx context.Context, limit int, attempt func() error) error {
	for ; ; limit-- {
		err := attempt()
		delay, is := delayAfter(err)
		if !is || limit == 0 {
			return err
		}
		if deadline, has := ctx.Deadline(); has && time.Until(deadline) <= delay {
			return err
		}
		if err := sleep(ctx, delay); err != nil {
			return err
		}
	}
}

// sleep returns after a time, or with an error as calls have it when the context ends before.
func sleep(ctx context.Context, delay time.Duration) error {
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return errorFrom(status.FromContextError(ctx.Err()).Err())
	}
}

// delayAfter returns how long to wait before a refused call is sent again; false where that makes no sense.
func delayAfter(err error) (time.Duration, bool) {
	var refused *Error
	if !errors.As(err, &refused) || refused.Code != codes.ResourceExhausted {
		return 0, false
	}
	delay, has := refused.RetryAfter()
	return time.Duration(float64(delay) * (1 + delaySpread*rand.Float64())), has
}
