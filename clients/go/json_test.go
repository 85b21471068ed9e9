package icehouse

import (
	"testing"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

type place struct {
	Name string `json:"name"`
}

// Place is exported: SchemaOf ignores embedded fields that are not.
type Place struct{ Name string }

type trip struct {
	From   place          `json:"from"`
	Stops  []place        `json:"stops"`
	Steps  uint           `json:"steps"`
	KM     float64        `json:"km"`
	Done   bool           `json:"done,omitempty"`
	Guide  *string        `json:"guide"`
	Costs  map[string]int `json:"costs"`
	Hidden string         `json:"-"`
	Plain  int
	hidden string
}

func TestATypeHasASchemaInTheOrderOfItsFields(t *testing.T) {
	const name = `{"type":"object","properties":{"name":{"type":"string"}},"required":["name"],"additionalProperties":false}`
	const want = `{"type":"object","properties":{"from":` + name + `,"stops":{"type":"array","items":` + name + `},` +
		`"steps":{"type":"integer","minimum":0},"km":{"type":"number"},"done":{"type":"boolean"},` +
		`"guide":{"anyOf":[{"type":"string"},{"type":"null"}]},` +
		`"costs":{"type":"object","additionalProperties":{"type":"integer"}},"Plain":{"type":"integer"}},` +
		`"required":["from","stops","steps","km","guide","costs","Plain"],"additionalProperties":false}`
	if schema, err := SchemaOf[trip](); err != nil || schema != want {
		t.Errorf("%s, not\n%s: %v", schema, want, err)
	}
}

func TestATypeWithoutASchemaIsRefused(t *testing.T) {
	type tree struct{ Branches []tree }
	for name, schemaOf := range map[string]func() (string, error){
		"func":     SchemaOf[func()],
		"any":      SchemaOf[any],
		"map":      SchemaOf[map[int]string],
		"itself":   SchemaOf[tree],
		"embedded": SchemaOf[struct{ Place }],
	} {
		if schema, err := schemaOf(); err == nil {
			t.Error(name, schema)
		}
	}
}

func TestAnOutputIsReadIntoItsType(t *testing.T) {
	script := &scripted{text: `{"name": "Oslo"}`}
	client := serve(t, script)
	request := &icehousev1.GenerateRequest{Prompt: Text("A city:")}
	value, response, err := GenerateJSON[place](t.Context(), client, request)
	if err != nil || value.Name != "Oslo" || response.GetText() != script.text || request.ResponseFormat != nil {
		t.Error(value, response, err)
	}
	schema, err := SchemaOf[place]()
	if err != nil || script.request.GetResponseFormat().GetJsonSchema() != schema {
		t.Error(script.request, err)
	}
	request.ResponseFormat = JSONSchema("{}")
	request.ResponseFormat.Compact = true
	if _, _, err = GenerateJSON[place](t.Context(), client, request); err != nil {
		t.Error(err)
	}
	if format := script.request.GetResponseFormat(); format.GetJsonSchema() != "{}" || !format.GetCompact() {
		t.Error(format)
	}
	if _, _, err = GenerateJSON[any](t.Context(), client, &icehousev1.GenerateRequest{}); err == nil {
		t.Error("any has a schema")
	}
}
