package icehouse

import (
	"encoding/json"
	"os"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// All client libraries have the same examples.
func TestPrefixKeyOfTheExamples(t *testing.T) {
	content, err := os.ReadFile("../prefix_keys.json")
	if err != nil {
		t.Fatal(err)
	}
	var examples []struct {
		Message string
		Request json.RawMessage
		Key     string
	}
	if err := json.Unmarshal(content, &examples); err != nil {
		t.Fatal(err)
	}
	if len(examples) == 0 {
		t.Fatal("there are no examples")
	}
	for _, example := range examples {
		name := protoreflect.FullName("icehouse.v1." + example.Message)
		kind, err := protoregistry.GlobalTypes.FindMessageByName(name)
		if err != nil {
			t.Fatal(err)
		}
		request := kind.New().Interface()
		if err := protojson.Unmarshal(example.Request, request); err != nil {
			t.Fatal(err)
		}
		if key := PrefixKey(request); key != example.Key {
			t.Errorf("%s %.80s: %s, not %s", example.Message, example.Request, key, example.Key)
		}
	}
}

func TestAPromptThatIsOnlyTokenizedHasNoPrefixKey(t *testing.T) {
	if key := PrefixKey(&icehousev1.TokenizeRequest{Prompt: Text("Once upon a time")}); key != "" {
		t.Error(key)
	}
}

func TestTheServiceConfigIsThePublishedOne(t *testing.T) {
	published, err := os.ReadFile("../service_config.json")
	if err != nil {
		t.Fatal(err)
	}
	if serviceConfig != string(published) {
		t.Error("service_config.json differs from clients/service_config.json; copy it here")
	}
}

func TestARoleOfATemplatesOwnCountsByItsName(t *testing.T) {
	prompt := Chat(&icehousev1.ChatMessage{RoleName: "ipython", Content: "1 + 1"}, User("Hi"))
	want := key("", "chat", "", []byte("ipython\x001 + 1\x00user\x00Hi\x00"))
	if found := PrefixKey(&icehousev1.GenerateRequest{Prompt: prompt}); found != want {
		t.Errorf("%s, not %s", found, want)
	}
}
