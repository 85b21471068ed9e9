package icehouse

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// PrefixKeyHeader is the header in which calls carry their [PrefixKey].
const PrefixKeyHeader = "icehouse-prefix-key"

const (
	textBytes  = 1024
	tokenCount = 256
	chatBytes  = 4096
)

// PrefixKey returns the key by which a load balancer sends prompts with the same beginning to the same server: 16 hex
// digits, equal for prompts that begin alike. Requests of Generate, Stream, Warm, Explain, Pin, Unpin, Evict, Export and
// Rerank have one, if they have a prompt; for all others it is empty. Every client library computes it the same way:
//
//	first 16 hex digits of SHA-256(model ‖ 0x00 ‖ kind ‖ 0x00 ‖ variant ‖ beginning)
//
// The kind is "text", "tokens", "chat", "infill" or, for Rerank, "query".
//
// The beginning of a text, a query or an infill's prefix is its first 1024 bytes in UTF-8; of tokens the first 256 ids,
// each as four bytes, little-endian. Of a conversation it is each message up to and including the first one of the user,
// as role ‖ 0x00 ‖ content ‖ 0x00, cut off after 4096 bytes. The role is a word such as "user", and the texts of a
// message's parts are joined to its content.
//
// The variant is the rest of what the cached blocks depend on: empty without an adapter and tools, otherwise
// adapter ‖ 0x00, and for each tool name ‖ 0x00 ‖ description ‖ 0x00 ‖ parameters_json ‖ 0x00.
func PrefixKey(request any) string {
	switch request := request.(type) {
	case *icehousev1.RerankRequest:
		return key(request.GetModel(), "query", variant(request.GetAdapter(), nil), firstBytes(request.GetQuery()))
	case *icehousev1.TokenizeRequest:
		return ""
	case prompted:
		prompt := request.GetPrompt()
		kind, start := beginning(prompt)
		if kind == "" {
			return ""
		}
		return key(request.GetModel(), kind, variant(prompt.GetAdapter(), prompt.GetTools()), start)
	default:
		return ""
	}
}

// prompted is a request with a prompt.
type prompted interface {
	GetModel() string
	GetPrompt() *icehousev1.Prompt
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

// beginning returns an empty kind where there is no prompt.
func beginning(prompt *icehousev1.Prompt) (kind string, start []byte) {
	switch form := prompt.GetForm().(type) {
	case *icehousev1.Prompt_Text:
		return "text", firstBytes(form.Text)
	case *icehousev1.Prompt_Chat:
		return "chat", turns(form.Chat)
	case *icehousev1.Prompt_Tokens:
		ids := form.Tokens.GetIds()
		for _, id := range ids[:min(len(ids), tokenCount)] {
			start = binary.LittleEndian.AppendUint32(start, uint32(id))
		}
		return "tokens", start
	case *icehousev1.Prompt_Infill:
		return "infill", firstBytes(form.Infill.GetPrefix())
	default:
		return "", nil
	}
}

func turns(chat *icehousev1.ChatPrompt) (start []byte) {
	for _, message := range chat.GetMessages() {
		role := roleOf(message)
		start = append(start, role+"\x00"+message.GetContent()...)
		for _, part := range message.GetParts() {
			start = append(start, part.GetText()...)
		}
		start = append(start, 0)
		if role == "user" || len(start) >= chatBytes {
			break
		}
	}
	return start[:min(len(start), chatBytes)]
}

func firstBytes(text string) []byte {
	return []byte(text[:min(len(text), textBytes)])
}
