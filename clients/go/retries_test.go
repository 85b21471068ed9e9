package icehouse

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// notNow returns a refusal that says when to try again.
func notNow(t *testing.T, code codes.Code, delay time.Duration) error {
	t.Helper()
	refusal, err := status.New(code, "not now").WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(delay)})
	if err != nil {
		t.Fatal(err)
	}
	return refusal.Err()
}

func TestWhatIsRefusedForNowIsSentAgain(t *testing.T) {
	script := &scripted{}
	client := serve(t, script, WithRetryLimit(2))
	for name, call := range map[string]func() error{
		"Generate": func() error {
			_, err := client.Generate(t.Context(), &icehousev1.GenerateRequest{Prompt: Text("Hi")})
			return err
		},
		"Rerank": func() error {
			_, err := client.Rerank(t.Context(), &icehousev1.RerankRequest{Query: "Hi"})
			return err
		},
	} {
		script.refusals, script.refusal = 2, notNow(t, codes.ResourceExhausted, 0)
		if err := call(); err != nil || script.refusals != 0 {
			t.Errorf("%s: %v, %d refusals are left", name, err, script.refusals)
		}
	}
}

func TestNothingElseIsSentAgain(t *testing.T) {
	for name, test := range map[string]struct {
		limit   int
		refusal error
		want    int
	}{
		"nobody asked for it":          {0, notNow(t, codes.ResourceExhausted, 0), 1},
		"as often as was asked":        {3, notNow(t, codes.ResourceExhausted, 0), 4},
		"the server does not say when": {3, status.Error(codes.ResourceExhausted, "not now"), 1},
		"it will never do":             {3, notNow(t, codes.InvalidArgument, 0), 1},
		"the deadline comes first":     {3, notNow(t, codes.ResourceExhausted, time.Hour), 1},
	} {
		t.Run(name, func(t *testing.T) {
			script := &scripted{refusals: 99, refusal: test.refusal}
			client := serve(t, script, WithRetryLimit(test.limit))
			_, err := client.Generate(t.Context(), &icehousev1.GenerateRequest{Prompt: Text("Hi")})
			if status.Code(err) != status.Code(test.refusal) || script.generations != test.want {
				t.Errorf("sent %d times, not %d: %v", script.generations, test.want, err)
			}
		})
	}
}

func TestACommandIsNotSentAgain(t *testing.T) {
	script := &scripted{refusals: 1, refusal: notNow(t, codes.ResourceExhausted, 0)}
	client := serve(t, script, WithRetryLimit(2))
	request := &icehousev1.WarmRequest{Prompt: Text("Hi")}
	if _, err := client.Warm(t.Context(), request); status.Code(err) != codes.ResourceExhausted {
		t.Error(err)
	}
}

func TestACancelledContextEndsTheWaiting(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	err := retry(ctx, 2, func() error {
		cancel()
		return errorFrom(notNow(t, codes.ResourceExhausted, time.Hour))
	})
	if !errors.Is(err, context.Canceled) || refusal(t, err).Code != codes.Canceled {
		t.Error(err)
	}
}

func TestAnAddressIsNotEmpty(t *testing.T) {
	for _, address := range []string{"", " "} {
		if _, err := Dial(address); err == nil || !strings.Contains(err.Error(), "must be host:port") {
			t.Errorf("%q: %v", address, err)
		}
	}
}

func TestARetryLimitIsNoNegativeNumber(t *testing.T) {
	if _, err := Dial("127.0.0.1:1", WithRetryLimit(-1)); err == nil {
		t.Error("-1 was taken")
	}
}
