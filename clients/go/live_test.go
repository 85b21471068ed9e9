package icehouse

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// servers are what tests/system/clients/live_servers.py has started and told in ICEHOUSE_TEST_SERVERS.
type servers struct {
	Model           string
	Address         string
	LimitedAddress  string `json:"limited_address"`
	TokensPerMinute int32  `json:"tokens_per_minute"`
	SecuredAddress  string `json:"secured_address"`
	CAPath          string `json:"ca_path"`
	Token           string
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

func TestStreamGivesWhatGenerateGives(t *testing.T) {
	found := liveServers(t)
	client := dial(t, found.Address)
	request := &icehousev1.GenerateRequest{Prompt: Text("Once upon a time"), MaxOutputTokens: 8}
	whole, err := client.Generate(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	stream, text := client.Stream(t.Context(), request), ""
	if _, err := stream.Reply(); !errors.Is(err, ErrNotEnded) {
		t.Error(err)
	}
	for piece, err := range stream.Texts() {
		if err != nil {
			t.Fatal(err)
		}
		text += piece
	}
	reply, err := stream.Reply()
	if err != nil {
		t.Fatal(err)
	}
	if text != whole.GetText() || reply.Text != text || fmt.Sprint(reply.TokenIDs) != fmt.Sprint(whole.GetTokenIds()) {
		t.Errorf("%q %v is not %q %v", text, reply.TokenIDs, whole.GetText(), whole.GetTokenIds())
	}
	if len(reply.TokenIDs) != 8 || reply.Started.GetModel() != found.Model {
		t.Error(reply)
	}
	if reply.Finished.GetFinishReason() != icehousev1.FinishReason_FINISH_REASON_LENGTH {
		t.Error(reply.Finished)
	}
}

func TestOfSeveralCompletionsTheFirstIsTheReply(t *testing.T) {
	client := dial(t, liveServers(t).Address)
	request := &icehousev1.GenerateRequest{
		Prompt: Text("Once"), MaxOutputTokens: 8, Completions: 2,
		Sampling: &icehousev1.SamplingParams{Temperature: new(1.0), Seed: new(uint64(7))},
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
		{Prompt: Chat(Message("system", "Be kind."), Message("user", "Hi")), MaxOutputTokens: 1},
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

func TestWhoUsedUpItsTokensIsToldWhenToComeBack(t *testing.T) {
	found := liveServers(t)
	client := dial(t, found.LimitedAddress)
	request := &icehousev1.GenerateRequest{
		Prompt:          Text("Once"),
		MaxOutputTokens: found.TokensPerMinute,
		Cache:           &icehousev1.CachePolicy{Tenant: "go-" + strconv.Itoa(os.Getpid())},
	}
	if _, err := client.Generate(t.Context(), request); err != nil {
		t.Fatal(err)
	}
	_, err := client.Generate(t.Context(), request)
	refused := refusal(t, err)
	delay, is := refused.RetryAfter()
	if refused.Code != codes.ResourceExhausted || refused.Reason != "TOKEN_RATE_EXCEEDED" {
		t.Error(refused)
	}
	if !is || delay <= 0 || delay > 2*time.Minute {
		t.Errorf("come back after %v", delay)
	}
}

func TestLeavingAStreamEndsItOnTheServer(t *testing.T) {
	client := dial(t, liveServers(t).Address)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	cancelled := func() int64 {
		stats, err := client.Inference.CacheStats(ctx, &icehousev1.CacheStatsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return stats.GetEngine().GetCancelledTotal()
	}
	before := cancelled()
	endless := &icehousev1.GenerateRequest{Prompt: Text("Once"), MaxOutputTokens: 4000}
	for _, err := range client.Stream(ctx, endless).Texts() {
		if err != nil {
			t.Fatal(err)
		}
		break
	}
	for cancelled() == before {
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

func TestASecuredServerWantsItsAuthorityAndAToken(t *testing.T) {
	found := liveServers(t)
	authority, err := os.ReadFile(found.CAPath)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(authority)
	trusting := WithTLS(&tls.Config{RootCAs: pool})
	request := &icehousev1.GenerateRequest{Prompt: Text("Hi"), MaxOutputTokens: 1}
	if _, err := dial(t, found.SecuredAddress, trusting, WithToken(found.Token)).Generate(t.Context(), request); err != nil {
		t.Error(err)
	}
	for name, options := range map[string][]Option{
		"CREDENTIALS_MISSING": {trusting},
		"CREDENTIALS_INVALID": {trusting, WithToken("wrong")},
		"UNAVAILABLE":         {WithTLS(&tls.Config{}), WithToken(found.Token)},
	} {
		_, err := dial(t, found.SecuredAddress, options...).Generate(t.Context(), request)
		if refused := refusal(t, err); refused.Reason != name {
			t.Errorf("%s: %v", name, refused)
		}
	}
}

func TestTheOtherServicesAreThereToo(t *testing.T) {
	found := liveServers(t)
	client := dial(t, found.Address)
	models, err := client.Models.ListModels(t.Context(), &icehousev1.ListModelsRequest{})
	if err != nil || len(models.GetModels()) != 1 || models.GetModels()[0].GetId() != found.Model {
		t.Error(models, err)
	}
	prompt := &icehousev1.ExplainRequest{Prompt: &icehousev1.ExplainRequest_Text{Text: "Hi"}}
	if _, err := client.Cache.Explain(t.Context(), prompt); err != nil {
		t.Error(err)
	}
	inputs := []*icehousev1.EmbedInput{{Input: &icehousev1.EmbedInput_Text{Text: "a"}}}
	vectors, err := client.Embeddings.Embed(t.Context(), &icehousev1.EmbedRequest{Inputs: inputs})
	if err != nil || len(vectors.GetEmbeddings()) != 1 {
		t.Errorf("Embed: %v, %v", vectors, err)
	}
	ranking, err := client.Reranking.Rerank(t.Context(), &icehousev1.RerankRequest{
		Query:          "a",
		Documents:      []string{"b", "c"},
		Form:           &icehousev1.RerankRequest_Text{Text: "{query} {document}"},
		PositiveAnswer: "y",
		NegativeAnswer: "n",
	})
	if err != nil || len(ranking.GetResults()) != 2 {
		t.Errorf("Rerank: %v, %v", ranking, err)
	}
	_, err = client.Models.GetModel(t.Context(), &icehousev1.GetModelRequest{Model: "none"})
	if refusal(t, err).Reason != "MODEL_NOT_FOUND" {
		t.Error(err)
	}
}

func TestNoServerIsAnErrorToo(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	_ = listener.Close()
	_, err = dial(t, address).Generate(t.Context(), &icehousev1.GenerateRequest{Prompt: Text("Hi")})
	if refused := refusal(t, err); refused.Code != codes.Unavailable || refused.Reason != "UNAVAILABLE" {
		t.Error(refused)
	}
}
