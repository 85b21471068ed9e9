package icehouse

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/metadata"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// TestScenarios runs every scenario of clients/scenarios.json, each in a test of its name.
func TestScenarios(t *testing.T) {
	found := liveServers(t)
	tests := map[string]func(*testing.T, scenario){
		"unary":              testUnary,
		"stream":             testStream,
		"cancel":             testCancel,
		"deadline":           testDeadline,
		"cancelled_by_id":    testCancelledByID,
		"invalid_argument":   testInvalidArgument,
		"not_found":          testNotFound,
		"already_exists":     testAlreadyExists,
		"id_of_two_tenants":  testIDOfTwoTenants,
		"unauthenticated":    testUnauthenticated,
		"permission_denied":  testPermissionDenied,
		"resource_exhausted": testResourceExhausted,
		"unavailable":        testUnavailable,
		"wait_ready":         testWaitReady,
		"wait_ready_coming":  testWaitReadyComing,
		"wait_ready_absent":  testWaitReadyLate,
		"wait_ready_loading": testWaitReadyLate,
		"retry_on_drain":     testRetryOnDrain,
		"retry_limit":        testRetryLimit,
		"tools_loop":         testToolsLoop,
		"reasoning_budget":   testReasoningBudget,
		"infill":             testInfill,
		"images":             testImages,
		"broken_image":       testBrokenImage,
		"images_unsupported": testImagesUnsupported,
		"structured_output":  testStructuredOutput,
		"unicode":            testUnicode,
		"hundred_streams":    testHundredStreams,
		"cache_report":       testCacheReport,
		"warm":               testWarm,
		"explain":            testExplain,
		"pin":                testPin,
		"unpin":              testUnpin,
		"evict":              testEvict,
		"verify":             testVerify,
		"watch_stats":        testWatchStats,
		"embed":              testEmbed,
		"rerank":             testRerank,
		"get_server":         testGetServer,
		"token_refresh":      testTokenRefresh,
		"call_metadata":      testCallMetadata,
		"tls_and_token":      testTLSAndToken,
	}
	for name, entry := range readScenarios(t) {
		test, has := tests[name]
		if !has {
			t.Errorf("nothing tests the scenario %s", name)
			continue
		}
		entry.name, entry.servers = name, found
		entry.run(t, test)
	}
}

func testUnary(t *testing.T, s scenario) {
	response, err := s.client(t).Generate(t.Context(), s.request())
	if err != nil {
		t.Fatal(err)
	}
	s.checkReply(t, ReplyOf(response))
	if response.GetModel() != s.servers.Model {
		t.Error(response.GetModel())
	}
}

func testStream(t *testing.T, s scenario) {
	client := s.client(t)
	whole, err := client.Generate(t.Context(), s.request())
	if err != nil {
		t.Fatal(err)
	}
	reply, _ := read(t, client.Stream(t.Context(), s.request()))
	s.checkReply(t, reply)
	if reply.Text != whole.GetText() || !slices.Equal(reply.TokenIDs, whole.GetTokenIds()) {
		t.Errorf("%q %v is not %q %v", reply.Text, reply.TokenIDs, whole.GetText(), whole.GetTokenIds())
	}
}

func (s scenario) checkReply(t *testing.T, reply *Reply) {
	t.Helper()
	usage, reason := reply.Finished.GetUsage(), reply.Finished.GetFinishReason()
	if usage.GetOutputTokens() != s.Expect.OutputTokens || len(reply.TokenIDs) != int(s.Expect.OutputTokens) {
		t.Errorf("%v of %v, not %d tokens", reply.TokenIDs, usage, s.Expect.OutputTokens)
	}
	if reason.String() != "FINISH_REASON_"+s.Expect.FinishReason {
		t.Error(reason)
	}
}

func testCancel(t *testing.T, s scenario) {
	client := s.client(t)
	for _, err := range client.Stream(t.Context(), s.request()).Texts() {
		if err != nil {
			t.Fatal(err)
		}
		break
	}
	for s.runs(t, client) {
	}
}

// runs reports whether the server has a request with the scenario's own name.
func (s scenario) runs(t *testing.T, client *Client) bool {
	t.Helper()
	for request, err := range client.ListRequests(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		if request.GetRequestId() == s.ownName() {
			return true
		}
	}
	return false
}

func testDeadline(t *testing.T, s scenario) {
	timeout := time.Duration(s.Input.TimeoutMS) * time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	err := end(s.client(t).Stream(ctx, s.request()))
	if refused := refusal(t, err); codeName(refused.Code) != s.Expect.Code {
		t.Error(refused)
	}
}

func testCancelledByID(t *testing.T, s scenario) {
	client := s.client(t)
	var cancelled *icehousev1.RequestInfo
	var last error
	for _, err := range client.Stream(t.Context(), s.request()).Texts() {
		last = err
		if cancelled != nil || err != nil {
			continue
		}
		if !s.runs(t, client) {
			t.Error("ListRequests does not have it")
		}
		if cancelled, err = client.CancelRequest(t.Context(), s.ownName()); err != nil {
			t.Fatal(err)
		}
	}
	s.checkRefused(t, last)
	if cancelled.GetMethod() != s.Expect.Method {
		t.Error(cancelled)
	}
}

func testInvalidArgument(t *testing.T, s scenario) {
	client := s.client(t)
	_, unary := client.Generate(t.Context(), s.request())
	for _, err := range []error{unary, end(client.Stream(t.Context(), s.request()))} {
		refused := s.checkRefused(t, err)
		if _, is := refused.RetryAfter(); is || refused.Field != s.Expect.Field {
			t.Errorf("%+v", refused)
		}
	}
}

func testNotFound(t *testing.T, s scenario) {
	request := s.request()
	request.Model = s.Input.Model
	_, err := s.client(t).Generate(t.Context(), request)
	if refused := s.checkRefused(t, err); refused.Metadata[s.Expect.MetadataKey] != s.servers.Model {
		t.Errorf("%+v", refused)
	}
}

func testAlreadyExists(t *testing.T, s scenario) {
	client := s.client(t)
	for _, err := range client.Stream(t.Context(), s.request()).Texts() {
		if err != nil {
			t.Fatal(err)
		}
		_, err := client.Generate(t.Context(), s.request())
		s.checkRefused(t, err)
		break
	}
}

func testIDOfTwoTenants(t *testing.T, s scenario) {
	client, one, other := s.client(t), s.request(), s.request()
	one.Cache = &icehousev1.CachePolicy{Tenant: s.ownName() + "-1"}
	other.Cache = &icehousev1.CachePolicy{Tenant: s.ownName() + "-2"}
	other.MaxOutputTokens = s.Input.OtherMaxTokens
	for _, err := range client.Stream(t.Context(), one).Texts() {
		if err != nil {
			t.Fatal(err)
		}
		response, err := client.Generate(t.Context(), other)
		if err != nil || response.GetUsage().GetOutputTokens() != s.Expect.OutputTokens {
			t.Error(response, err)
		}
		if one.RequestId == "" || one.RequestId != other.RequestId {
			t.Error(one.RequestId, other.RequestId)
		}
		break
	}
}

func testUnauthenticated(t *testing.T, s scenario) {
	for reason, options := range map[string][]Option{
		s.Expect.MissingReason: {s.trusting(t)},
		s.Expect.UnknownReason: {s.trusting(t), WithToken(s.Input.UnknownToken)},
	} {
		_, err := s.client(t, options...).Generate(t.Context(), s.request())
		if refused := refusal(t, err); codeName(refused.Code) != s.Expect.Code || refused.Reason != reason {
			t.Errorf("%v is not %s", refused, reason)
		}
	}
}

func testPermissionDenied(t *testing.T, s scenario) {
	request := s.request()
	request.Cache = &icehousev1.CachePolicy{Tenant: s.Input.Tenant}
	_, err := s.client(t, s.trusting(t), WithToken(s.servers.Token)).Generate(t.Context(), request)
	s.checkRefused(t, err)
}

func testResourceExhausted(t *testing.T, s scenario) {
	client, request := s.client(t), s.tenantRequest()
	request.MaxOutputTokens = s.servers.TokensPerMinute
	if _, err := client.Generate(t.Context(), request); err != nil {
		t.Fatal(err)
	}
	_, err := client.Generate(t.Context(), request)
	delay, is := s.checkRefused(t, err).RetryAfter()
	if !is || delay <= 0 || delay.Seconds() > s.Expect.RetryAfterLimitS {
		t.Errorf("come back after %v", delay)
	}
}

func testUnavailable(t *testing.T, s scenario) {
	s.checkRefused(t, end(s.client(t).Stream(t.Context(), s.request())))
}

func testRetryOnDrain(t *testing.T, s scenario) {
	client := s.client(t)
	response, err := client.Generate(t.Context(), s.request())
	if err != nil || response.GetUsage().GetOutputTokens() != s.Expect.OutputTokens {
		t.Error(response, err)
	}
	s.checkRefused(t, end(client.Stream(t.Context(), s.request())))
}

func testRetryLimit(t *testing.T, s scenario) {
	client, request := s.client(t, WithRetryLimit(s.Input.RetryLimit)), s.request()
	response, err := client.Generate(t.Context(), request)
	if err != nil || response.GetUsage().GetOutputTokens() != s.Expect.OutputTokens {
		t.Error(response, err)
	}
	s.checkRefused(t, end(client.Stream(t.Context(), request)))
	request.RequestId += "-again"
	_, err = s.client(t, WithRetryLimit(s.Input.RetryLimit-1)).Generate(t.Context(), request)
	if _, is := s.checkRefused(t, err).RetryAfter(); !is {
		t.Error(err)
	}
}

func testToolsLoop(t *testing.T, s scenario) {
	client, talk := s.client(t), NewConversation("")
	tool, err := Tool(s.Input.Tool.Name, s.Input.Tool.Description, s.Input.Tool.Parameters)
	if err != nil {
		t.Fatal(err)
	}
	talk.Tools = []*icehousev1.Tool{tool}
	talk.Say(s.Input.Question)
	request := talk.Request()
	request.Cache = s.tenantCache()
	response, err := client.Generate(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	first := ReplyOf(response)
	streamed, _ := read(t, client.Stream(t.Context(), request))
	for _, reply := range []*Reply{first, streamed} {
		s.checkToolCall(t, reply)
	}
	talk.Add(first)
	talk.Answer(first.ToolCalls[0], s.Input.Result)
	next := talk.Request()
	next.Cache, next.MaxOutputTokens = request.Cache, 1
	next.ToolChoice = &icehousev1.ToolChoice{Mode: icehousev1.ToolChoiceMode_TOOL_CHOICE_MODE_NONE}
	following, err := client.Generate(t.Context(), next)
	if err != nil {
		t.Fatal(err)
	}
	known := response.GetUsage().GetPromptTokens() + response.GetUsage().GetOutputTokens()
	usage := following.GetUsage()
	if usage.GetPromptTokens() <= known || usage.GetCachedTokens() <= known-s.Expect.UncachedKnownTokensLimit {
		t.Errorf("%v after %d known tokens", usage, known)
	}
}

func (s scenario) checkToolCall(t *testing.T, reply *Reply) {
	t.Helper()
	if reply.Text != s.Expect.Text || reply.Reasoning != s.Expect.Reasoning {
		t.Errorf("%q, %q", reply.Text, reply.Reasoning)
	}
	if reason := reply.Finished.GetFinishReason(); reason.String() != "FINISH_REASON_"+s.Expect.FinishReason {
		t.Error(reason)
	}
	if len(reply.ToolCalls) != 1 {
		t.Fatal(reply.ToolCalls)
	}
	call := reply.ToolCalls[0]
	if call.GetName() != s.Input.Tool.Name || !sameJSON(t, call.GetArgumentsJson(), string(s.Expect.Arguments)) {
		t.Error(call)
	}
}

func sameJSON(t *testing.T, one, other string) bool {
	t.Helper()
	var texts []string
	for _, text := range []string{one, other} {
		var value any
		if err := json.Unmarshal([]byte(text), &value); err != nil {
			t.Fatal(err)
		}
		again, err := json.Marshal(value)
		if err != nil {
			t.Fatal(err)
		}
		texts = append(texts, string(again))
	}
	return texts[0] == texts[1]
}

func testReasoningBudget(t *testing.T, s scenario) {
	client, talk := s.client(t), NewConversation("")
	talk.Say(s.Input.Question)
	request := talk.Request()
	request.MaxOutputTokens = s.Input.MaxOutputTokens
	response, err := client.Generate(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	if response.GetText() != s.Expect.Text || response.GetReasoning() != s.Expect.Reasoning {
		t.Errorf("%q, %q", response.GetText(), response.GetReasoning())
	}
	if count := response.GetUsage().GetReasoningTokens(); count != s.Expect.ReasoningTokens {
		t.Error(count)
	}
	request.MaxReasoningTokens = &s.Input.MaxReasoning
	closed, err := client.Generate(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(closed.GetText(), s.Expect.Text) || closed.GetReasoning() != "" {
		t.Errorf("%q, %q", closed.GetText(), closed.GetReasoning())
	}
	if count := closed.GetUsage().GetReasoningTokens(); count != s.Expect.ClosedReasoningTokens {
		t.Error(count)
	}
}

func testInfill(t *testing.T, s scenario) {
	client, prompt := s.client(t), Infill(s.Input.Prefix, s.Input.Suffix)
	response, err := client.Generate(t.Context(), &icehousev1.GenerateRequest{
		Prompt: prompt, MaxOutputTokens: s.Input.MaxOutputTokens,
	})
	if err != nil {
		t.Fatal(err)
	}
	reason := response.GetFinishReason().String()
	if response.GetText() != s.Expect.Text || reason != "FINISH_REASON_"+s.Expect.FinishReason {
		t.Errorf("%q, %s", response.GetText(), reason)
	}
	if ids := response.GetTokenIds(); response.GetStopTokenId() != ids[len(ids)-1] {
		t.Error(response.GetStopTokenId(), ids)
	}
	tokens, err := client.Tokenize(t.Context(), prompt)
	if err != nil || len(tokens) != int(response.GetUsage().GetPromptTokens()) {
		t.Error(tokens, err)
	}
}

func testStructuredOutput(t *testing.T, s scenario) {
	request := s.request()
	request.ResponseFormat = JSONSchema(string(s.Input.Schema))
	request.ResponseFormat.Compact = true
	response, err := s.client(t).Generate(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	type city struct {
		City        string
		Inhabitants int
	}
	var found city
	if err := ReplyOf(response).Decode(&found); err != nil || response.GetText() != s.Expect.Text {
		t.Errorf("%q: %v", response.GetText(), err)
	}
	if found != (city{s.Expect.City, s.Expect.Inhabitants}) {
		t.Errorf("%+v", found)
	}
	again, _, err := GenerateJSON[city](t.Context(), s.client(t), request)
	if err != nil || again != found {
		t.Errorf("%+v: %v", again, err)
	}
}

func testUnicode(t *testing.T, s scenario) {
	client, request := s.client(t), s.request()
	request.ResponseFormat = Choice(s.Input.Choice)
	response, err := client.Generate(t.Context(), request)
	if err != nil || response.GetText() != s.Expect.Text {
		t.Errorf("%q: %v", response.GetText(), err)
	}
	reply, pieces := read(t, client.Stream(t.Context(), request))
	if reply.Text != s.Expect.Text || len(pieces) < 2 || strings.Contains(reply.Text, "\uFFFD") {
		t.Errorf("%q", pieces)
	}
	tokens, err := client.Tokenize(t.Context(), Text(s.Input.Text))
	if err != nil {
		t.Fatal(err)
	}
	var ids []int32
	for _, token := range tokens {
		ids = append(ids, token.GetId())
	}
	if text, err := client.Detokenize(t.Context(), ids...); err != nil || text != s.Expect.Text {
		t.Errorf("%q: %v", text, err)
	}
}

func testHundredStreams(t *testing.T, s scenario) {
	client := s.client(t)
	whole, err := client.Generate(t.Context(), s.request())
	if err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	for range s.Input.StreamCount {
		group.Go(func() {
			request := s.request()
			request.RequestId = ""
			stream := client.Stream(t.Context(), request)
			if err := end(stream); err != nil {
				t.Error(err)
				return
			}
			reply, err := stream.Reply()
			if err != nil || reply.Text != whole.GetText() || len(reply.TokenIDs) != int(s.Expect.OutputTokens) {
				t.Error(reply, err)
			}
		})
	}
	group.Wait()
}

func testTokenRefresh(t *testing.T, s scenario) {
	clientWith := func(tokens ...string) (*Client, *int) {
		count := new(int)
		return s.client(t, s.trusting(t), WithTokenSource(func(context.Context) (string, error) {
			*count++
			return tokens[min(*count, len(tokens))-1], nil
		})), count
	}
	client, count := clientWith(s.Input.UnknownToken, s.servers.Token)
	for range 2 {
		response, err := client.Generate(t.Context(), s.request())
		if err != nil || response.GetUsage().GetOutputTokens() != s.Expect.OutputTokens || *count != s.Expect.SourceCallCount {
			t.Errorf("asked %d times: %v %v", *count, response, err)
		}
	}
	client, count = clientWith(s.Input.UnknownToken, s.servers.Token)
	reply, _ := read(t, client.Stream(t.Context(), s.request()))
	if len(reply.TokenIDs) != int(s.Expect.OutputTokens) || *count != s.Expect.SourceCallCount {
		t.Errorf("asked %d times: %v", *count, reply)
	}
	client, count = clientWith(s.Input.UnknownToken)
	_, err := client.Generate(t.Context(), s.request())
	if s.checkRefused(t, err); *count != s.Expect.SourceCallCount {
		t.Errorf("asked %d times", *count)
	}
}

func testCallMetadata(t *testing.T, s scenario) {
	client := s.client(t, s.trusting(t))
	own := metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer "+s.servers.Token)
	response, err := client.Generate(own, s.request())
	if err != nil || response.GetUsage().GetOutputTokens() != s.Expect.OutputTokens {
		t.Error(response, err)
	}
	read(t, client.Stream(own, s.request()))
	_, err = client.Generate(t.Context(), s.request())
	s.checkRefused(t, err)
}

func testTLSAndToken(t *testing.T, s scenario) {
	token := WithToken(s.servers.Token)
	response, err := s.client(t, s.trusting(t), token).Generate(t.Context(), s.request())
	if err != nil || response.GetUsage().GetOutputTokens() != s.Expect.OutputTokens {
		t.Error(response, err)
	}
	untrusting := s.client(t, WithTLS(&tls.Config{}), token)
	if refused := refusal(t, end(untrusting.Stream(t.Context(), s.request()))); codeName(refused.Code) != s.Expect.UntrustedCode {
		t.Error(refused)
	}
}
