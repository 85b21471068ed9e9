package icehouse

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// servers are the ones that tests/system/clients/live_servers.py started, as ICEHOUSE_TEST_SERVERS describes them.
type servers struct {
	Model           string
	Address         string
	LimitedAddress  string `json:"limited_address"`
	TokensPerMinute int32  `json:"tokens_per_minute"`
	SecuredAddress  string `json:"secured_address"`
	CAPath          string `json:"ca_path"`
	Token           string
	ChatAddress     string `json:"chat_address"`
	VisionAddress   string `json:"vision_address"`
	DrainingAddress string `json:"draining_address"`
	BusyAddress     string `json:"busy_address"`
	UnusedAddress   string `json:"unused_address"`
	ComingAddress   string `json:"coming_address"`
	LoadingAddress  string `json:"loading_address"`
}

func liveServers(t *testing.T) servers {
	t.Helper()
	line := os.Getenv("ICEHOUSE_TEST_SERVERS")
	if line == "" {
		t.Skip("ICEHOUSE_TEST_SERVERS names no servers; `make test-clients` starts them")
	}
	var found servers
	if err := json.Unmarshal([]byte(line), &found); err != nil {
		t.Fatal(err)
	}
	return found
}

func dial(t *testing.T, address string, options ...Option) *Client {
	t.Helper()
	client, err := Dial(address, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func refusal(t *testing.T, err error) *Error {
	t.Helper()
	var refused *Error
	if !errors.As(err, &refused) {
		t.Fatalf("%v is no *Error", err)
	}
	return refused
}

func TestOfSeveralCompletionsTheFirstIsTheReply(t *testing.T) {
	client := dial(t, liveServers(t).Address)
	request := &icehousev1.GenerateRequest{
		Prompt: Text("Once"), MaxOutputTokens: 8, Completions: 2,
		Sampling: &icehousev1.SamplingParams{Temperature: 1, Seed: new(uint64(7))},
	}
	whole, err := client.Generate(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	first, second := whole.GetCompletions()[0], whole.GetCompletions()[1]
	if first.GetText() == second.GetText() {
		t.Fatal("two completions of one text tell nothing")
	}
	stream, text := client.Stream(t.Context(), request), ""
	for piece, err := range stream.Texts() {
		if err != nil {
			t.Fatal(err)
		}
		text += piece
	}
	reply, err := stream.Reply()
	if err != nil || text != first.GetText() || reply.Text != text || len(reply.TokenIDs) != len(first.GetTokenIds()) {
		t.Errorf("%q, %v, %v is not %q", text, reply, err, first.GetText())
	}
}

func TestPromptsOfEveryKind(t *testing.T) {
	client := dial(t, liveServers(t).Address)
	for _, request := range []*icehousev1.GenerateRequest{
		{Prompt: Text("Hi"), MaxOutputTokens: 1},
		{Prompt: Tokens(10, 11, 12), MaxOutputTokens: 1},
		{Prompt: Chat(System("Be kind."), User("Hi"), Assistant("Hello."), User("How are you?")), MaxOutputTokens: 1},
	} {
		response, err := client.Generate(t.Context(), request)
		if err != nil || response.GetUsage().GetOutputTokens() != 1 {
			t.Error(response, err)
		}
	}
}

func TestARefusalSaysWhatIsWrong(t *testing.T) {
	client := dial(t, liveServers(t).Address)
	request := &icehousev1.GenerateRequest{Prompt: Text("Hi"), MaxOutputTokens: -1}
	_, err := client.Generate(t.Context(), request)
	refused := refusal(t, err)
	if refused.Code != codes.InvalidArgument || refused.Reason != "PARAMETER_OUT_OF_RANGE" {
		t.Error(refused)
	}
	if refused.Field != "max_output_tokens" || len(refused.Metadata) == 0 || status.Code(err) != codes.InvalidArgument {
		t.Errorf("%+v", refused)
	}
	if _, is := refused.RetryAfter(); is {
		t.Error("trying again cannot help")
	}
	stream := client.Stream(t.Context(), request)
	for _, err := range stream.Texts() {
		if refusal(t, err).Reason != "PARAMETER_OUT_OF_RANGE" {
			t.Error(err)
		}
	}
	if _, err := stream.Reply(); refusal(t, err).Field != "max_output_tokens" {
		t.Error(err)
	}
}

func TestADeadlineEndsAStream(t *testing.T) {
	client := dial(t, liveServers(t).Address, WithTimeout(200*time.Millisecond))
	stream := client.Stream(t.Context(), &icehousev1.GenerateRequest{Prompt: Text("Once"), MaxOutputTokens: 4000})
	var last error
	for _, err := range stream.Texts() {
		last = err
	}
	if !errors.Is(last, context.DeadlineExceeded) || refusal(t, last).Code != codes.DeadlineExceeded {
		t.Error(last)
	}
}

func TestACancelledContextEndsAStream(t *testing.T) {
	client := dial(t, liveServers(t).Address)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var last error
	stream := client.Stream(ctx, &icehousev1.GenerateRequest{Prompt: Text("Once"), MaxOutputTokens: 4000})
	for _, err := range stream.Texts() {
		last = err
		cancel()
	}
	if !errors.Is(last, context.Canceled) {
		t.Error(last)
	}
}

func TestTheModelsAreThereToo(t *testing.T) {
	found := liveServers(t)
	client := dial(t, found.Address)
	models, err := client.Models.ListModels(t.Context(), &icehousev1.ListModelsRequest{})
	if err != nil || len(models.GetModels()) != 1 || models.GetModels()[0].GetId() != found.Model {
		t.Error(models, err)
	}
	_, err = client.Models.GetModel(t.Context(), &icehousev1.GetModelRequest{Model: "none"})
	if refusal(t, err).Reason != "MODEL_NOT_FOUND" {
		t.Error(err)
	}
}

func TestTheCountersAreThereAtOnce(t *testing.T) {
	stats, err := dial(t, liveServers(t).Address).GetStats(t.Context())
	if err != nil || stats.GetCollectTime() == nil || stats.GetEngine() == nil || stats.GetCache() == nil {
		t.Error(stats, err)
	}
}

func TestAllBlocksAreEvicted(t *testing.T) {
	client := dial(t, liveServers(t).ChatAddress)
	prompt := Text(strings.Repeat("The ice house keeps what was cut in winter. ", 8))
	if _, err := client.Warm(t.Context(), &icehousev1.WarmRequest{Prompt: prompt}); err != nil {
		t.Fatal(err)
	}
	var steps []*icehousev1.EvictProgress
	result, err := client.EvictAll(t.Context(), &icehousev1.EvictAllRequest{}, func(progress *icehousev1.EvictProgress) {
		steps = append(steps, progress)
	})
	if err != nil || result.GetRamBlockCount() == 0 || len(steps) == 0 {
		t.Error(result, steps, err)
	}
	explained, err := client.Explain(t.Context(), &icehousev1.ExplainRequest{Prompt: prompt})
	if err != nil || len(explained.GetBlocks()) != 0 {
		t.Error(explained, err)
	}
}
