package icehouse

import icehousev1 "icehouse.dev/api/icehouse/v1"

// Text returns a prompt of plain text, for GenerateRequest.Prompt.
func Text(text string) *icehousev1.GenerateRequest_Text {
	return &icehousev1.GenerateRequest_Text{Text: text}
}

// Tokens returns a prompt of token ids, used as they are.
func Tokens(ids ...int32) *icehousev1.GenerateRequest_Tokens {
	return &icehousev1.GenerateRequest_Tokens{Tokens: &icehousev1.TokenPrompt{Ids: ids}}
}

// Chat returns a prompt that is a conversation, oldest turn first.
func Chat(messages ...*icehousev1.ChatMessage) *icehousev1.GenerateRequest_Chat {
	return &icehousev1.GenerateRequest_Chat{Chat: &icehousev1.ChatPrompt{Messages: messages}}
}

// Message returns a turn of a conversation. role is "system", "user", "assistant" or "tool".
func Message(role, content string) *icehousev1.ChatMessage {
	return &icehousev1.ChatMessage{Role: role, Content: content}
}
