package icehouse

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"

	"google.golang.org/protobuf/encoding/protojson"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

const (
	conversationKind    = "icehouse-conversation"
	conversationVersion = 1
)

// keptConversation is what a file has of a [Conversation].
type keptConversation struct {
	Kind      string            `json:"kind"`
	Version   int               `json:"version"`
	SessionID string            `json:"session_id"`
	Messages  []json.RawMessage `json:"messages"`
}

// MarshalJSON returns the turns as text, to be kept; clients of every language read it. Tools are not kept.
func (c Conversation) MarshalJSON() ([]byte, error) {
	kept := keptConversation{
		Kind: conversationKind, Version: conversationVersion, SessionID: c.SessionID,
		Messages: make([]json.RawMessage, len(c.Messages)),
	}
	for i, message := range c.Messages {
		text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(message)
		if err != nil {
			return nil, fmt.Errorf("icehouse: messages[%d]: %w", i, err)
		}
		fields := map[string]json.RawMessage{"content": json.RawMessage(`""`)}
		if err := json.Unmarshal(text, &fields); err != nil {
			return nil, fmt.Errorf("icehouse: messages[%d]: %w", i, err)
		}
		if kept.Messages[i], err = json.Marshal(fields); err != nil {
			return nil, fmt.Errorf("icehouse: messages[%d]: %w", i, err)
		}
	}
	return json.Marshal(kept)
}

// UnmarshalJSON reads the turns in a text that was kept, or in a plain list of {"role", "content"}; the
// conversation's tools stay.
func (c *Conversation) UnmarshalJSON(text []byte) error {
	var kept keptConversation
	if json.Unmarshal(text, &kept.Messages) != nil || kept.Messages == nil {
		kept.Messages = nil
		if err := json.Unmarshal(text, &kept); err != nil {
			return fmt.Errorf("icehouse: no conversation: %w", err)
		}
		if kept.Kind != conversationKind || kept.Version != conversationVersion {
			return fmt.Errorf("icehouse: no conversation: it is of kind %q, version %d", kept.Kind, kept.Version)
		}
		if kept.Messages == nil {
			return errors.New("icehouse: no conversation: there is no list of messages")
		}
	}
	messages := make([]*icehousev1.ChatMessage, len(kept.Messages))
	for i, fields := range kept.Messages {
		messages[i] = &icehousev1.ChatMessage{}
		if err := protojson.Unmarshal(fields, messages[i]); err != nil {
			return fmt.Errorf("icehouse: no conversation: messages[%d]: %w", i, err)
		}
		if messages[i].GetRole() == "" {
			return fmt.Errorf("icehouse: no conversation: messages[%d] has no role", i)
		}
	}
	if kept.SessionID == "" {
		kept.SessionID = rand.Text()
	}
	c.Messages, c.SessionID = messages, kept.SessionID
	return nil
}
