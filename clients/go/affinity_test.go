package icehouse

import (
	"encoding/json"
	"os"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// The examples are those of all client libraries.
func TestPrefixKeyOfTheExamples(t *testing.T) {
	content, err := os.ReadFile("../prefix_keys.json")
	if err != nil {
		t.Fatal(err)
	}
	var examples []struct {
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
		var request icehousev1.GenerateRequest
		if err := protojson.Unmarshal(example.Request, &request); err != nil {
			t.Fatal(err)
		}
		if key := PrefixKey(&request); key != example.Key {
			t.Errorf("%.80s: %s, not %s", example.Request, key, example.Key)
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
