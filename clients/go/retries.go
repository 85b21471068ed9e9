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

// delaySpread is how much longer a delay gets at most, as a fraction of it, so that callers who were refused together do
// not return together.
const delaySpread = 0.25

// retryLimitOf returns how often a call that is refused for now is repeated.
func (s *settings) retryLimitOf(method string) int {
	switch method {
	case icehousev1.InferenceService_Generate_FullMethodName,
		icehousev1.EmbeddingService_Embed_FullMethodName,
		icehousev1.RerankService_Rerank_FullMethodName:
		return s.retryLimit
	}
	return 0
}

// retry calls attempt, and again up to limit times while it is refused for now, but never past the context's deadline.
func retry(ctx context.Context, limit int, attempt func() error) error {
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

// sleep returns after the delay, or with an *Error if the context ends before.
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

// delayAfter returns how long to wait before repeating a refused call; false if it should not be repeated.
func delayAfter(err error) (time.Duration, bool) {
	var refused *Error
	if !errors.As(err, &refused) || refused.Code != codes.ResourceExhausted {
		return 0, false
	}
	delay, has := refused.RetryAfter()
	return time.Duration(float64(delay) * (1 + delaySpread*rand.Float64())), has
}
