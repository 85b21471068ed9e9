package icehouse

import (
	"crypto/rand"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// Conversation is the turns so far, each answer with its tokens, reasoning and tool calls, so that every
// turn starts from the cached blocks of the one before. The zero value is an empty one. Not safe for
// concurrent use.
//
//	talk := icehouse.NewConversation("Be brief.")
//	talk.Say("What is ice?")
//	response, err := client.Generate(ctx, talk.Request())
//	talk.Add(icehouse.ReplyOf(response))
type Conversation struct {
	// Messages are the turns, oldest first.
	Messages []*icehousev1.ChatMessage
	// Tools are what the model may ask for.
	Tools []*icehousev1.Tool
	// SessionID names it to gateways, logs and traces.
	SessionID string
}

// NewConversation returns one with an id of its own, which begins with a system prompt unless that is empty.
func NewConversation(system string) *Conversation {
	made := &Conversation{SessionID: rand.Text()}
	if system != "" {
		made.Messages = append(made.Messages, Message("system", system))
	}
	return made
}

// Say adds the user's turn; images stand before its text.
func (c *Conversation) Say(text string, images ...*icehousev1.ImagePart) {
	c.Messages = append(c.Messages, Message("user", text, images...))
}

// Add adds the assistant's turn, an answer as it came.
func (c *Conversation) Add(reply *Reply) {
	c.Messages = append(c.Messages, reply.Message())
}

// Answer adds the result of a call that the assistant asked for.
func (c *Conversation) Answer(call *icehousev1.ToolCall, content string) {
	c.Messages = append(c.Messages, ToolResult(call, content))
}

// Request returns a request for the next turn, to which limits, sampling and the like can be added.
func (c *Conversation) Request() *icehousev1.GenerateRequest {
	return &icehousev1.GenerateRequest{Prompt: Chat(c.Messages...), Tools: c.Tools, SessionId: c.SessionID}
}
