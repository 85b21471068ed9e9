package icehouse

import (
	"encoding/json"
	"os"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

// The examples are those of all client libraries.
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

func TestTheServiceConfigIsThePublishedOne(t *testing.T) {
	published, err := os.ReadFile("../service_config.json")
	if err != nil {
		t.Fatal(err)
	}
	if ServiceConfig != string(published) {
		t.Error("service_config.json differs from clients/service_config.json; copy it here")
	}
}
