package icehouse

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// GenerateJSON returns an output as a Go value. The output has the request's ResponseFormat or, without one, the schema
// of the type (see [SchemaOf]). If the output was cut off by a limit, GenerateJSON returns an error and the response.
func GenerateJSON[T any](
	ctx context.Context, client *Client, request *icehousev1.GenerateRequest,
) (T, *icehousev1.GenerateResponse, error) {
	var value T
	if request.GetResponseFormat() == nil {
		schema, err := SchemaOf[T]()
		if err != nil {
			return value, nil, err
		}
		request = proto.CloneOf(request)
		request.ResponseFormat = JSONSchema(schema)
	}
	response, err := client.Generate(ctx, request)
	if err != nil {
		return value, nil, err
	}
	return value, response, ReplyOf(response).Decode(&value)
}

// SchemaOf returns the JSON schema of a type, as encoding/json encodes it. Fields of structs are required unless their
// tags have omitempty or omitzero, and no other properties are allowed. Pointers may be null. Besides structs and
// pointers, SchemaOf knows strings, bools, numbers, slices, arrays and maps with string keys.
func SchemaOf[T any]() (string, error) {
	schema, err := schemaOf(reflect.TypeFor[T](), nil)
	if err != nil {
		return "", err
	}
	text, err := json.Marshal(schema)
	return string(text), err
}

// property is one member of an object.
type property struct {
	name   string
	schema any
}

// properties encodes to an object with its members in this order, in which they are generated, too.
type properties []property

func (p properties) MarshalJSON() ([]byte, error) {
	members := make([]string, len(p))
	for i, member := range p {
		name, err := json.Marshal(member.name)
		if err != nil {
			return nil, err
		}
		schema, err := json.Marshal(member.schema)
		if err != nil {
			return nil, err
		}
		members[i] = string(name) + ":" + string(schema)
	}
	return []byte("{" + strings.Join(members, ",") + "}"), nil
}

func schemaOf(of reflect.Type, within []reflect.Type) (any, error) {
	if slices.Contains(within, of) {
		return nil, fmt.Errorf("icehouse: %v contains itself, so it has no JSON schema here", of)
	}
	switch of.Kind() {
	case reflect.String:
		return properties{{"type", "string"}}, nil
	case reflect.Bool:
		return properties{{"type", "boolean"}}, nil
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return properties{{"type", "integer"}}, nil
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return properties{{"type", "integer"}, {"minimum", 0}}, nil
	case reflect.Float32, reflect.Float64:
		return properties{{"type", "number"}}, nil
	case reflect.Pointer:
		return composed("anyOf", of, within, func(schema any) any {
			return []any{schema, properties{{"type", "null"}}}
		})
	case reflect.Slice, reflect.Array:
		return composed("items", of, within, nil, property{"type", "array"})
	case reflect.Map:
		if of.Key().Kind() == reflect.String {
			return composed("additionalProperties", of, within, nil, property{"type", "object"})
		}
	case reflect.Struct:
		return structSchema(of, append(within, of))
	}
	return nil, fmt.Errorf("icehouse: %v has no JSON schema here; give the request a ResponseFormat", of)
}

// composed returns the schema of a type with an element: the properties before, then the element's schema under name.
func composed(
	name string, of reflect.Type, within []reflect.Type, put func(any) any, before ...property,
) (any, error) {
	schema, err := schemaOf(of.Elem(), within)
	if err != nil {
		return nil, err
	}
	if put != nil {
		schema = put(schema)
	}
	return append(properties(before), property{name, schema}), nil
}

func structSchema(of reflect.Type, within []reflect.Type) (any, error) {
	members, required := properties{}, []string{}
	for i := range of.NumField() {
		field := of.Field(i)
		name, options, _ := strings.Cut(field.Tag.Get("json"), ",")
		if !field.IsExported() || name == "-" && options == "" {
			continue
		}
		if field.Anonymous && name == "" {
			return nil, fmt.Errorf("icehouse: %v embeds %v, so it has no JSON schema here", of, field.Type)
		}
		if name == "" {
			name = field.Name
		}
		schema, err := schemaOf(field.Type, within)
		if err != nil {
			return nil, err
		}
		members = append(members, property{name, schema})
		if !strings.Contains(options, "omitempty") && !strings.Contains(options, "omitzero") {
			required = append(required, name)
		}
	}
	return properties{
		{"type", "object"}, {"properties", members}, {"required", required}, {"additionalProperties", false},
	}, nil
}
