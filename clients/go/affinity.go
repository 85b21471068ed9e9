package icehouse

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// PrefixKeyHeader is the header that carries [PrefixKey] with every Generate and Stream.
const PrefixKeyHeader = "icehouse-prefix-key"

const (
	textBytes  = 1024
	tokenCount = 256
	chatBytes  = 4096
)

// PrefixKey returns the key by which a load balancer sends prompts with one beginning to one server:
// 16 hex digits, equal for prompts that begin alike. Every client library makes it the same way:
//
//	first 16 hex digits of SHA-256(model ‖ 0x00 ‖ kind ‖ 0x00 ‖ beginning)
//
// kind is "text", "tokens" or "chat". The beginning is the first 1024 bytes of the text in UTF-8; the
// first 256 token ids, each as four bytes, little-endian; or of a conversation each message up to and
// with the first of role "user", as role ‖ 0x00 ‖ content ‖ 0x00, cut after 4096 bytes.
func PrefixKey(request *icehousev1.GenerateRequest) string {
	kind, start := beginning(request)
	digest := sha256.New()
	digest.Write([]byte(request.GetModel() + "\x00" + kind + "\x00"))
	digest.Write(start)
	return hex.EncodeToString(digest.Sum(nil))[:16]
}

func beginning(request *icehousev1.GenerateRequest) (kind string, start []byte) {
	switch prompt := request.GetPrompt().(type) {
	case *icehousev1.GenerateRequest_Text:
		return "text", []byte(prompt.Text[:min(len(prompt.Text), textBytes)])
	case *icehousev1.GenerateRequest_Tokens:
		ids := prompt.Tokens.GetIds()
		for _, id := range ids[:min(len(ids), tokenCount)] {
			start = binary.LittleEndian.AppendUint32(start, uint32(id))
		}
		return "tokens", start
	case *icehousev1.GenerateRequest_Chat:
		for _, message := range prompt.Chat.GetMessages() {
			start = append(start, message.GetRole()+"\x00"+message.GetContent()+"\x00"...)
			if message.GetRole() == "user" || len(start) >= chatBytes {
				break
			}
		}
		return "chat", start[:min(len(start), chatBytes)]
	default:
		return "", nil
	}
}
