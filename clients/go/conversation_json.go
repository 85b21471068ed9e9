package icehouse

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

const (
	conversationKind    = "icehouse-conversation"
	conversationVersion = 1
)

// roles are the roles of the API by the words that chat templates have for them.
var roles = map[string]icehousev1.Role{
	"system":    icehousev1.Role_ROLE_SYSTEM,
	"developer": icehousev1.Role_ROLE_DEVELOPER,
	"user":      icehousev1.Role_ROLE_USER,
	"assistant": icehousev1.Role_ROLE_ASSISTANT,
	"tool":      icehousev1.Role_ROLE_TOOL,
}

// roleOf returns the word for a message's role.
func roleOf(message *icehousev1.ChatMessage) string {
	if role := message.GetRole(); role != icehousev1.Role_ROLE_UNSPECIFIED {
		return strings.ToLower(strings.TrimPrefix(role.String(), "ROLE_"))
	}
	return message.GetRoleName()
}

// savedConversation is the JSON of a [Conversation].
type savedConversation struct {
	Kind      string            `json:"kind"`
	Version   int               `json:"version"`
	SessionID string            `json:"session_id"`
	Messages  []json.RawMessage `json:"messages"`
}

// MarshalJSON returns the turns and the SessionID, without the tools. The clients of all languages read it.
func (c Conversation) MarshalJSON() ([]byte, error) {
	saved := savedConversation{
		Kind: conversationKind, Version: conversationVersion, SessionID: c.SessionID,
		Messages: make([]json.RawMessage, len(c.Messages)),
	}
	for i, message := range c.Messages {
		var err error
		if saved.Messages[i], err = saveMessage(message); err != nil {
			return nil, fmt.Errorf("icehouse: messages[%d]: %w", i, err)
		}
	}
	return json.Marshal(saved)
}

// UnmarshalJSON reads the turns of a saved conversation, or a plain list of {"role", "content"}. It leaves the tools as
// they are.
func (c *Conversation) UnmarshalJSON(text []byte) error {
	saved, err := parseConversation(text)
	if err != nil {
		return fmt.Errorf("icehouse: not a conversation: %w", err)
	}
	messages := make([]*icehousev1.ChatMessage, len(saved.Messages))
	for i, text := range saved.Messages {
		if messages[i], err = parseMessage(text); err != nil {
			return fmt.Errorf("icehouse: not a conversation: messages[%d]: %w", i, err)
		}
	}
	if saved.SessionID == "" {
		saved.SessionID = rand.Text()
	}
	c.Messages, c.SessionID = messages, saved.SessionID
	return nil
}

func parseConversation(text []byte) (saved savedConversation, err error) {
	if strings.HasPrefix(strings.TrimSpace(string(text)), "[") {
		return saved, json.Unmarshal(text, &saved.Messages)
	}
	if err := json.Unmarshal(text, &saved); err != nil {
		return saved, err
	}
	if saved.Kind != conversationKind || saved.Version != conversationVersion {
		return saved, fmt.Errorf("it is of kind %q, version %d", saved.Kind, saved.Version)
	}
	if saved.Messages == nil {
		return saved, errors.New("it has no list of messages")
	}
	return saved, nil
}

// saveMessage returns a message as protojson writes it, but with its role as a word and its content even if empty.
func saveMessage(message *icehousev1.ChatMessage) (json.RawMessage, error) {
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(message)
	if err != nil {
		return nil, err
	}
	fields := map[string]json.RawMessage{"content": json.RawMessage(`""`)}
	if err := json.Unmarshal(text, &fields); err != nil {
		return nil, err
	}
	delete(fields, "role_name")
	if fields["role"], err = json.Marshal(roleOf(message)); err != nil {
		return nil, err
	}
	return json.Marshal(fields)
}

func parseMessage(text json.RawMessage) (*icehousev1.ChatMessage, error) {
	fields := map[string]any{}
	if err := json.Unmarshal(text, &fields); err != nil {
		return nil, err
	}
	role, _ := fields["role"].(string)
	if role == "" {
		return nil, errors.New("it has no role")
	}
	delete(fields, "role")
	message := &icehousev1.ChatMessage{}
	rest, err := json.Marshal(fields)
	if err != nil {
		return nil, err
	}
	if err := protojson.Unmarshal(rest, message); err != nil {
		return nil, err
	}
	if known, is := roles[role]; is {
		message.Role = known
	} else {
		message.RoleName = role
	}
	return message, nil
}
