package icehouse

import (
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	icehousev1 "icehouse.dev/api/icehouse/v1"
)

func testCacheReport(t *testing.T, s scenario) {
	client := s.client(t)
	first, err := client.Generate(t.Context(), s.tenantRequest())
	if err != nil || first.GetUsage().GetCachedTokens() != s.Expect.FirstCachedTokens {
		t.Fatal(first, err)
	}
	stream := client.Stream(t.Context(), s.tenantRequest())
	for _, err := range stream.Texts() {
		if err != nil {
			t.Fatal(err)
		}
		break
	}
	cached := stream.Started().GetCache().GetCachedTokens()
	missing := stream.Started().GetPromptTokens() - cached
	if missing <= 0 || missing > s.Expect.UncachedTokensLimit {
		t.Error(stream.Started())
	}
	request := s.tenantRequest()
	request.RequestId = ""
	second, err := client.Generate(t.Context(), request)
	if usage := second.GetUsage(); err != nil || usage.GetRamTokens() != cached || usage.GetCachedTokens() != cached {
		t.Error(usage, err)
	}
}

// tenantCache returns the cache policy of a tenant that no other test uses.
func (s scenario) tenantCache() *icehousev1.CachePolicy {
	return &icehousev1.CachePolicy{Tenant: s.ownName()}
}

func (s scenario) warmRequest() *icehousev1.WarmRequest {
	return &icehousev1.WarmRequest{RequestId: s.ownName(), Prompt: s.prompt(), Cache: s.tenantCache()}
}

// warm warms the scenario's prompt for that tenant.
func (s scenario) warm(t *testing.T, client *Client) {
	t.Helper()
	if _, err := client.Warm(t.Context(), s.warmRequest()); err != nil {
		t.Fatal(err)
	}
}

// explain returns what that tenant's cache has of the prompt.
func (s scenario) explain(t *testing.T, client *Client) *icehousev1.ExplainResponse {
	t.Helper()
	explained, err := client.Explain(t.Context(), &icehousev1.ExplainRequest{Prompt: s.prompt(), Cache: s.tenantCache()})
	if err != nil {
		t.Fatal(err)
	}
	return explained
}

func testWarm(t *testing.T, s scenario) {
	var processed []int32
	result, err := s.client(t).Warm(t.Context(), s.warmRequest(), func(progress *icehousev1.WarmProgress) {
		processed = append(processed, progress.GetProcessedTokens())
	})
	if err != nil {
		t.Fatal(err)
	}
	usage := result.GetUsage()
	if usage.GetOutputTokens() != s.Expect.OutputTokens || result.GetRequestId() != s.ownName() {
		t.Error(result)
	}
	if len(processed) == 0 || !slices.IsSorted(processed) {
		t.Fatal(processed)
	}
	missing := usage.GetPromptTokens() - processed[len(processed)-1]
	if missing < 0 || missing > s.Expect.UnprocessedTokensLimit {
		t.Errorf("%v of %v", processed, usage)
	}
}

func testExplain(t *testing.T, s scenario) {
	client := s.client(t)
	if cached := s.explain(t, client).GetCache().GetCachedTokens(); cached != s.Expect.FirstCachedTokens {
		t.Error(cached)
	}
	s.warm(t, client)
	known := s.explain(t, client)
	inRAM := known.GetCache().GetRamTokens()
	if missing := known.GetPromptTokens() - inRAM; missing > s.Expect.UncachedTokensLimit {
		t.Error(known)
	}
	if tokensOf(known.GetBlocks()) != inRAM {
		t.Error(known.GetBlocks())
	}
}

func tokensOf(blocks []*icehousev1.BlockMatch) (sum int32) {
	for _, block := range blocks {
		sum += block.GetTokenCount()
	}
	return sum
}

func testPin(t *testing.T, s scenario) {
	client := s.client(t)
	s.warm(t, client)
	pinned, err := client.Pin(t.Context(), &icehousev1.PinRequest{
		Prompt: s.prompt(), Cache: s.tenantCache(), Ttl: &durationpb.Duration{Seconds: s.Input.TTLSeconds},
	})
	if err != nil {
		t.Fatal(err)
	}
	blocks := s.explain(t, client).GetBlocks()
	if len(blocks) == 0 || int(pinned.GetBlockCount()) != len(blocks) || pinned.GetTokenCount() != tokensOf(blocks) {
		t.Error(pinned, blocks)
	}
	if slices.ContainsFunc(blocks, func(block *icehousev1.BlockMatch) bool { return !block.GetPinned() }) {
		t.Error(blocks)
	}
}

func testUnpin(t *testing.T, s scenario) {
	client := s.client(t)
	s.warm(t, client)
	pinned, err := client.Pin(t.Context(), &icehousev1.PinRequest{Prompt: s.prompt(), Cache: s.tenantCache()})
	if err != nil {
		t.Fatal(err)
	}
	unpinned, err := client.Unpin(t.Context(), &icehousev1.UnpinRequest{Prompt: s.prompt(), Cache: s.tenantCache()})
	if err != nil || unpinned.GetBlockCount() == 0 || unpinned.GetBlockCount() != pinned.GetBlockCount() {
		t.Error(unpinned, pinned, err)
	}
	if blocks := s.explain(t, client).GetBlocks(); slices.ContainsFunc(blocks, (*icehousev1.BlockMatch).GetPinned) {
		t.Error(blocks)
	}
}

func testEvict(t *testing.T, s scenario) {
	client := s.client(t)
	s.warm(t, client)
	evicted, err := client.Evict(t.Context(), &icehousev1.EvictRequest{Prompt: s.prompt(), Cache: s.tenantCache()})
	if err != nil || evicted.GetRamBlockCount() == 0 {
		t.Error(evicted, err)
	}
	if left := s.explain(t, client).GetCache().GetCachedTokens(); left != s.Expect.CachedTokens {
		t.Error(left)
	}
}

func testVerify(t *testing.T, s scenario) {
	var counts []int64
	result, err := s.client(t).Verify(
		t.Context(), &icehousev1.VerifyRequest{},
		func(progress *icehousev1.VerifyProgress) { counts = append(counts, progress.GetVerifiedBlockCount()) },
	)
	if err != nil || result.GetDamagedBlockCount() != s.Expect.DamagedBlockCount {
		t.Fatal(result, err)
	}
	if !slices.IsSorted(counts) || len(counts) == 0 || counts[len(counts)-1] != result.GetVerifiedBlockCount() {
		t.Error(counts, result)
	}
}

func testWatchStats(t *testing.T, s scenario) {
	var times []time.Time
	interval := time.Duration(s.Input.IntervalMS) * time.Millisecond
	for stats, err := range s.client(t).WatchStats(t.Context(), interval) {
		if err != nil {
			t.Fatal(err)
		}
		if times = append(times, stats.GetCollectTime().AsTime()); len(times) == s.Input.AnswerCount {
			break
		}
	}
	if len(times) != s.Input.AnswerCount || !slices.IsSortedFunc(times, time.Time.Compare) {
		t.Error(times)
	}
}

func testEmbed(t *testing.T, s scenario) {
	request := &icehousev1.EmbedRequest{Inputs: Inputs(s.Input.Texts...), Dimensions: s.Input.Dimensions}
	response, err := s.client(t).Embed(t.Context(), request)
	if err != nil || len(response.GetEmbeddings()) != s.Expect.VectorCount || response.GetPromptTokens() == 0 {
		t.Fatal(response, err)
	}
	for _, embedding := range response.GetEmbeddings() {
		if len(embedding.GetValues()) != s.Expect.VectorSize {
			t.Error(embedding)
		}
	}
}

func testRerank(t *testing.T, s scenario) {
	response, err := s.client(t).Rerank(t.Context(), &icehousev1.RerankRequest{
		Query:          s.Input.Query,
		Documents:      s.Input.Documents,
		Form:           &icehousev1.RerankRequest_Text{Text: s.Input.Template},
		PositiveAnswer: s.Input.PositiveAnswer,
		NegativeAnswer: s.Input.NegativeAnswer,
	})
	if err != nil || response.GetPromptTokens() == 0 {
		t.Fatal(response, err)
	}
	var indexes []int32
	last := 1.0
	for _, result := range response.GetResults() {
		indexes = append(indexes, result.GetIndex())
		if result.GetScore() > last {
			t.Error(response.GetResults())
		}
		last = result.GetScore()
	}
	if slices.Sort(indexes); !slices.Equal(indexes, s.Expect.Indexes) {
		t.Error(indexes)
	}
}

func testGetServer(t *testing.T, s scenario) {
	client := s.client(t)
	if _, err := client.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	server, err := client.GetServer(t.Context())
	if err != nil || server.GetVersion() == "" || server.GetLimits().GetMaxOutputTokens() == 0 {
		t.Fatal(server, err)
	}
	feature := icehousev1.ServerFeature_value["SERVER_FEATURE_"+s.Expect.Feature]
	if server.GetState().String() != "SERVER_STATE_"+s.Expect.State || feature == 0 ||
		!slices.Contains(server.GetFeatures(), icehousev1.ServerFeature(feature)) {
		t.Error(server)
	}
}
