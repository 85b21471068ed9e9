package icehouse

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// PrefixKeyHeader is the header that carries [PrefixKey] with every call whose cache it concerns.
const PrefixKeyHeader = "icehouse-prefix-key"

const (
	textBytes  = 1024
	tokenCount = 256
	chatBytes  = 4096
)

// PrefixKey returns the key by which a load balancer sends prompts with one beginning to one server:
// 16 hex digits, equal for prompts that begin alike. Messages without a prompt that is cached have none:
// those with one are of Generate, Stream, Warm, Explain, Pin, Unpin, Evict and Rerank. Every client library
// makes it the same way:
//
//	first 16 hex digits of SHA-256(model ‖ 0x00 ‖ kind ‖ 0x00 ‖ variant ‖ beginning)
//
// kind is "text", "tokens", "chat", "infill" or, for Rerank, "query". The beginning is the first 1024 bytes of
// the text, the query or the infill's prefix in UTF-8; the first 256 token ids, each as four bytes, little-endian; or of a
// conversation each message up to and with the first of role "user", as role ‖ 0x00 ‖ content ‖ 0x00 with
// the texts of parts joined to the content, cut after 4096 bytes. The variant is what else makes KV another:
// empty without an adapter and tools, otherwise adapter ‖ 0x00 and of each tool
// name ‖ 0x00 ‖ description ‖ 0x00 ‖ parameters_json ‖ 0x00.
func PrefixKey(request any) string {
	switch request := request.(type) {
	case *icehousev1.RerankRequest:
		return key(request.GetModel(), "query", variant(request.GetAdapter(), nil), firstBytes(request.GetQuery()))
	case prompted:
		kind, start := beginning(request)
		if kind == "" {
			return ""
		}
		return key(request.GetModel(), kind, variant(request.GetAdapter(), request.GetTools()), start)
	default:
		return ""
	}
}

// prompted is a message with a prompt that the cache is asked for.
type prompted interface {
	GetModel() string
	GetAdapter() string
	GetTools() []*icehousev1.Tool
	GetText() string
	GetChat() *icehousev1.ChatPrompt
	GetTokens() *icehousev1.TokenPrompt
}

func key(model, kind, variant string, start []byte) string {
	digest := sha256.New()
	digest.Write([]byte(model + "\x00" + kind + "\x00" + variant))
	digest.Write(start)
	return hex.EncodeToString(digest.Sum(nil))[:16]
}

func variant(adapter string, tools []*icehousev1.Tool) string {
	if adapter == "" && len(tools) == 0 {
		return ""
	}
	text := adapter + "\x00"
	for _, tool := range tools {
		text += tool.GetName() + "\x00" + tool.GetDescription() + "\x00" + tool.GetParametersJson() + "\x00"
	}
	return text
}

func beginning(request prompted) (kind string, start []byte) {
	if tokens := request.GetTokens(); tokens != nil {
		ids := tokens.GetIds()
		for _, id := range ids[:min(len(ids), tokenCount)] {
			start = binary.LittleEndian.AppendUint32(start, uint32(id))
		}
		return "tokens", start
	}
	if chat := request.GetChat(); chat != nil {
		return "chat", turns(chat)
	}
	if generate, is := request.(*icehousev1.GenerateRequest); is && generate.GetInfill() != nil {
		return "infill", firstBytes(generate.GetInfill().GetPrefix())
	}
	if text := request.GetText(); text != "" {
		return "text", firstBytes(text)
	}
	return "", nil
}

func turns(chat *icehousev1.ChatPrompt) (start []byte) {
	for _, message := range chat.GetMessages() {
		start = append(start, message.GetRole()+"\x00"+message.GetContent()...)
		for _, part := range message.GetParts() {
			start = append(start, part.GetText()...)
		}
		start = append(start, 0)
		if message.GetRole() == "user" || len(start) >= chatBytes {
			break
		}
	}
	return start[:min(len(start), chatBytes)]
}

func firstBytes(text string) []byte {
	return []byte(text[:min(len(text), textBytes)])
}
