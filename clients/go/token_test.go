package icehouse

import (
	"context"
	"errors"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// numbered returns a source of the tokens "I", "II" and so on, and how many it has given.
func numbered() (Option, *int) {
	count := new(int)
	return WithTokenSource(func(context.Context) (string, error) {
		*count++
		return strings.Repeat("I", *count), nil
	}), count
}

func TestARefusedTokenIsAskedForAnewAndTheCallMadeAgain(t *testing.T) {
	refusal := status.Error(codes.Unauthenticated, "expired")
	request := &icehousev1.GenerateRequest{Prompt: Text("Hi")}
	for name, call := range map[string]func(*Client) error{
		"Generate": func(client *Client) error {
			_, err := client.Generate(t.Context(), request)
			return err
		},
		"Stream": func(client *Client) error { return end(client.Stream(t.Context(), request)) },
	} {
		t.Run(name, func(t *testing.T) {
			script := &scripted{}
			option, count := numbered()
			client := serve(t, script, option)
			for refusals, want := range []string{"Bearer I", "Bearer II"} {
				script.refusals, script.refusal = refusals, refusal
				if err := call(client); err != nil || script.headers.Get("authorization")[0] != want {
					t.Error(script.headers, err)
				}
			}
			script.refusals = 2
			if err := call(client); status.Code(err) != codes.Unauthenticated || *count != 3 {
				t.Errorf("asked %d times: %v", *count, err)
			}
		})
	}
}

func TestATokenWithoutASourceIsRefusedForGood(t *testing.T) {
	script := &scripted{refusals: 1, refusal: status.Error(codes.Unauthenticated, "expired")}
	client := serve(t, script, WithToken("secret"))
	_, err := client.Generate(t.Context(), &icehousev1.GenerateRequest{Prompt: Text("Hi")})
	if status.Code(err) != codes.Unauthenticated || script.generations != 1 {
		t.Errorf("sent %d times: %v", script.generations, err)
	}
}

func TestATokenOfTheCallsOwnComesFirst(t *testing.T) {
	script := &scripted{}
	option, count := numbered()
	client := serve(t, script, option)
	own := metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer own", "team", "search")
	if _, err := client.Generate(own, &icehousev1.GenerateRequest{Prompt: Text("Hi")}); err != nil {
		t.Fatal(err)
	}
	tokens, team := script.headers.Get("authorization"), script.headers.Get("team")
	if len(tokens) != 1 || tokens[0] != "Bearer own" || len(team) != 1 || *count != 0 {
		t.Error(script.headers, *count)
	}
}

func TestASourceThatFailsEndsTheCall(t *testing.T) {
	absent := errors.New("the file is not there")
	script := &scripted{}
	client := serve(t, script, WithTokenSource(func(context.Context) (string, error) { return "", absent }))
	request := &icehousev1.GenerateRequest{Prompt: Text("Hi")}
	if _, err := client.Generate(t.Context(), request); !errors.Is(err, absent) {
		t.Error(err)
	}
	if err := end(client.Stream(t.Context(), request)); !errors.Is(err, absent) || script.streams != 0 {
		t.Error(err)
	}
}
