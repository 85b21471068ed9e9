package icehouse

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// scenario is an entry of clients/scenarios.json. The two structs have the fields of all entries.
type scenario struct {
	About  string
	Server string
	Input  struct {
		Text            string
		TextUnit        string `json:"text_unit"`
		TTLSeconds      int64  `json:"ttl_s"`
		Repeat          int
		MaxOutputTokens int32  `json:"max_output_tokens"`
		OtherMaxTokens  int32  `json:"other_max_output_tokens"`
		TimeoutMS       int64  `json:"timeout_ms"`
		IntervalMS      int64  `json:"interval_ms"`
		AnswerCount     int    `json:"answer_count"`
		StreamCount     int    `json:"stream_count"`
		UnknownToken    string `json:"unknown_token"`
		RetryLimit      int    `json:"retry_limit"`
		Model           string
		Tenant          string
		Question        string
		Prefix, Suffix  string
		MaxReasoning    int32 `json:"max_reasoning_tokens"`
		Tool            struct {
			Name, Description string
			Parameters        json.RawMessage
		}
		Result         string
		Schema         json.RawMessage
		Choice         string
		Texts          []string
		Dimensions     int32
		Query          string
		Documents      []string
		Template       string
		Image          []byte
		OtherImage     []byte `json:"other_image"`
		MediaType      string `json:"media_type"`
		PositiveAnswer string `json:"positive_answer"`
		NegativeAnswer string `json:"negative_answer"`
	}
	Expect struct {
		OutputTokens             int32  `json:"output_tokens"`
		FinishReason             string `json:"finish_reason"`
		Code                     string
		Reason                   string
		Method                   string
		Field                    string
		MetadataKey              string  `json:"metadata_key"`
		MissingReason            string  `json:"missing_reason"`
		UnknownReason            string  `json:"unknown_reason"`
		RetryAfterLimitS         float64 `json:"retry_after_limit_s"`
		Text                     string
		Reasoning                string
		ReasoningTokens          int32 `json:"reasoning_tokens"`
		ClosedReasoningTokens    int32 `json:"closed_reasoning_tokens"`
		Arguments                json.RawMessage
		City                     string
		Inhabitants              int
		CachedTokens             int32  `json:"cached_tokens"`
		FirstCachedTokens        int32  `json:"first_cached_tokens"`
		UncachedTokensLimit      int32  `json:"uncached_tokens_limit"`
		UncachedKnownTokensLimit int32  `json:"uncached_known_tokens_limit"`
		UnprocessedTokensLimit   int32  `json:"unprocessed_tokens_limit"`
		SourceCallCount          int    `json:"source_call_count"`
		DamagedBlockCount        int64  `json:"damaged_block_count"`
		ImageTokens              int32  `json:"image_tokens"`
		OtherCachedTokensLimit   int32  `json:"other_cached_tokens_limit"`
		MessagePart              string `json:"message_part"`
		VectorCount              int    `json:"vector_count"`
		VectorSize               int    `json:"vector_size"`
		Indexes                  []int32
		State                    string
		Feature                  string
		UntrustedCode            string `json:"untrusted_code"`
	}

	// name and servers are not in the file.
	name    string
	servers servers
}

// readScenarios returns all scenarios by name. It refuses fields that are not in the structs, so that none goes
// untested.
func readScenarios(t *testing.T) map[string]scenario {
	t.Helper()
	text, err := os.ReadFile("../scenarios.json")
	if err != nil {
		t.Fatal(err)
	}
	found, decoder := map[string]scenario{}, json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&found); err != nil {
		t.Fatal(err)
	}
	return found
}

// run runs a scenario as a test of its name, and appends the result to the file that ICEHOUSE_TEST_RESULTS names.
func (s scenario) run(t *testing.T, test func(*testing.T, scenario)) {
	t.Run(s.name, func(t *testing.T) {
		if path := os.Getenv("ICEHOUSE_TEST_RESULTS"); path != "" {
			t.Cleanup(func() { s.record(t, path) })
		}
		test(t, s)
	})
}

func (s scenario) record(t *testing.T, path string) {
	if t.Skipped() {
		return
	}
	line, err := json.Marshal(map[string]any{"scenario": s.name, "passed": !t.Failed()})
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if _, err := file.Write(append(line, '\n')); err != nil {
		t.Error(err)
	}
}

// client returns a client of the scenario's server.
func (s scenario) client(t *testing.T, options ...Option) *Client {
	t.Helper()
	address, named := map[string]string{
		"address":          s.servers.Address,
		"limited_address":  s.servers.LimitedAddress,
		"secured_address":  s.servers.SecuredAddress,
		"chat_address":     s.servers.ChatAddress,
		"vision_address":   s.servers.VisionAddress,
		"draining_address": s.servers.DrainingAddress,
		"busy_address":     s.servers.BusyAddress,
		"unused_address":   s.servers.UnusedAddress,
		"coming_address":   s.servers.ComingAddress,
		"loading_address":  s.servers.LoadingAddress,
	}[s.Server]
	if !named {
		t.Fatalf("there is no server %q", s.Server)
	}
	if address == "" {
		t.Skip("its server could not be started; `make test-clients` says why")
	}
	return dial(t, address, options...)
}

// trusting returns the option to trust the secured server's certificate authority.
func (s scenario) trusting(t *testing.T) Option {
	t.Helper()
	authority, err := os.ReadFile(s.servers.CAPath)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(authority)
	return WithTLS(&tls.Config{RootCAs: pool})
}

// ownName returns a name that no other test uses, for a request or a tenant.
func (s scenario) ownName() string {
	return fmt.Sprintf("go-%s-%d", s.name, os.Getpid())
}

func (s scenario) prompt() *icehousev1.Prompt {
	if s.Input.Text != "" {
		return Text(s.Input.Text)
	}
	return Text(strings.Repeat(s.Input.TextUnit, s.Input.Repeat))
}

// request returns a request for the scenario's prompt.
func (s scenario) request() *icehousev1.GenerateRequest {
	return &icehousev1.GenerateRequest{
		RequestId: s.ownName(), Prompt: s.prompt(), MaxOutputTokens: s.Input.MaxOutputTokens,
	}
}

// tenantRequest returns the same request for a tenant that no other test uses.
func (s scenario) tenantRequest() *icehousev1.GenerateRequest {
	request := s.request()
	request.Cache = s.tenantCache()
	return request
}

// checkRefused checks that a call was refused as the scenario says.
func (s scenario) checkRefused(t *testing.T, err error) *Error {
	t.Helper()
	refused := refusal(t, err)
	if codeName(refused.Code) != s.Expect.Code || refused.Reason != s.Expect.Reason {
		t.Errorf("%v is not %s (%s)", refused, s.Expect.Code, s.Expect.Reason)
	}
	return refused
}

// read reads a stream to its end and checks that its pieces, joined, are the text of its reply.
func read(t *testing.T, stream *Stream) (*Reply, []string) {
	t.Helper()
	var pieces []string
	for piece, err := range stream.Texts() {
		if err != nil {
			t.Fatal(err)
		}
		pieces = append(pieces, piece)
	}
	reply, err := stream.Reply()
	if err != nil {
		t.Fatal(err)
	}
	if strings.Join(pieces, "") != reply.Text {
		t.Errorf("%q is not %q", pieces, reply.Text)
	}
	return reply, pieces
}

// end reads a stream to its end and returns the error that it ended with.
func end(stream *Stream) (last error) {
	for _, err := range stream.Texts() {
		last = err
	}
	return last
}
