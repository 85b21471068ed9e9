package icehouse

import (
	"crypto/rand"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// Conversation holds the turns so far. It keeps each answer with its tokens, reasoning and tool calls, so that the next
// turn starts from the cached blocks of the last one. The zero value is empty and ready to use. It is not safe for
// concurrent use.
//
//	talk := icehouse.NewConversation("Be brief.")
//	talk.Say("What is ice?")
//	response, err := client.Generate(ctx, talk.Request())
//	talk.Add(icehouse.ReplyOf(response))
type Conversation struct {
	// Messages are the turns, oldest first.
	Messages []*icehousev1.ChatMessage
	// Tools are the functions that the model may call.
	Tools []*icehousev1.Tool
	// SessionID identifies it to gateways, logs and traces.
	SessionID string
}

// NewConversation returns a conversation with a new SessionID. It begins with the system prompt, unless that is empty.
func NewConversation(system string) *Conversation {
	conversation := &Conversation{SessionID: rand.Text()}
	if system != "" {
		conversation.Messages = append(conversation.Messages, System(system))
	}
	return conversation
}

// Say adds the user's turn. Images come before the text.
func (c *Conversation) Say(text string, images ...*icehousev1.ImagePart) {
	c.Messages = append(c.Messages, User(text, images...))
}

// Add adds an answer of the model.
func (c *Conversation) Add(reply *Reply) {
	c.Messages = append(c.Messages, reply.Message())
}

// Answer adds the result of a tool call that the model made.
func (c *Conversation) Answer(call *icehousev1.ToolCall, content string) {
	c.Messages = append(c.Messages, ToolResult(call, content))
}

// Request returns the request for the next turn. Set limits, sampling and so on in it.
func (c *Conversation) Request() *icehousev1.GenerateRequest {
	prompt := Chat(c.Messages...)
	prompt.Tools = c.Tools
	return &icehousev1.GenerateRequest{Prompt: prompt, SessionId: c.SessionID}
}
