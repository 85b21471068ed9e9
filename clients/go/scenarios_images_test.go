package icehouse

import (
	"slices"
	"strings"
	"testing"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// shown returns a request about an image, for a tenant that no other test uses.
func (s scenario) shown(image []byte) *icehousev1.GenerateRequest {
	talk := NewConversation("")
	talk.Say(s.Input.Question, Image(image, s.Input.MediaType))
	request := talk.Request()
	request.MaxOutputTokens = s.Input.MaxOutputTokens
	request.Cache = s.tenantCache()
	return request
}

func testImages(t *testing.T, s scenario) {
	client := s.client(t)
	var answers []*icehousev1.GenerateResponse
	for _, image := range [][]byte{s.Input.Image, s.Input.Image, s.Input.OtherImage} {
		response, err := client.Generate(t.Context(), s.shown(image))
		if err != nil {
			t.Fatal(err)
		}
		if count := response.GetUsage().GetImageTokens(); count != s.Expect.ImageTokens {
			t.Error(count)
		}
		answers = append(answers, response)
	}
	first, again, other := answers[0], answers[1], answers[2]
	if cached := first.GetUsage().GetCachedTokens(); cached != s.Expect.FirstCachedTokens {
		t.Error(cached)
	}
	usage := again.GetUsage()
	if usage.GetPromptTokens()-usage.GetRamTokens() > s.Expect.UncachedTokensLimit {
		t.Error(usage)
	}
	if !slices.Equal(first.GetTokenIds(), again.GetTokenIds()) {
		t.Errorf("%v is not %v", again.GetTokenIds(), first.GetTokenIds())
	}
	if cached := other.GetUsage().GetCachedTokens(); cached >= s.Expect.OtherCachedTokensLimit {
		t.Error(cached)
	}
}

func testBrokenImage(t *testing.T, s scenario) {
	s.refusedImage(t)
}

func testImagesUnsupported(t *testing.T, s scenario) {
	refused := s.refusedImage(t)
	if !strings.Contains(refused.Message, s.Expect.MessagePart) || refused.Metadata[s.Expect.MetadataKey] == "" {
		t.Errorf("%+v", refused)
	}
}

func (s scenario) refusedImage(t *testing.T) *Error {
	t.Helper()
	_, err := s.client(t).Generate(t.Context(), s.shown(s.Input.Image))
	refused := s.checkRefused(t, err)
	if refused.Field != s.Expect.Field {
		t.Error(refused.Field)
	}
	return refused
}
