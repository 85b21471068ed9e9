package icehouse

import (
	"encoding/json"
	"fmt"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// Text returns a prompt of plain text, for GenerateRequest.Prompt.
func Text(text string) *icehousev1.GenerateRequest_Text {
	return &icehousev1.GenerateRequest_Text{Text: text}
}

// Tokens returns a prompt of token ids, used as they are.
func Tokens(ids ...int32) *icehousev1.GenerateRequest_Tokens {
	return &icehousev1.GenerateRequest_Tokens{Tokens: &icehousev1.TokenPrompt{Ids: ids}}
}

// Infill returns a prompt with a gap between two texts, which the output fills: for models of code that were
// trained to.
func Infill(prefix, suffix string) *icehousev1.GenerateRequest_Infill {
	return &icehousev1.GenerateRequest_Infill{Infill: &icehousev1.InfillPrompt{Prefix: prefix, Suffix: suffix}}
}

// Chat returns a prompt that is a conversation, oldest turn first.
func Chat(messages ...*icehousev1.ChatMessage) *icehousev1.GenerateRequest_Chat {
	return &icehousev1.GenerateRequest_Chat{Chat: &icehousev1.ChatPrompt{Messages: messages}}
}

// Message returns a turn of a conversation. role is "system", "user", "assistant" or "tool". Images, which only
// the user's turns may have, stand before the content.
func Message(role, content string, images ...*icehousev1.ImagePart) *icehousev1.ChatMessage {
	if len(images) == 0 {
		return &icehousev1.ChatMessage{Role: role, Content: content}
	}
	message := &icehousev1.ChatMessage{Role: role}
	for _, image := range images {
		message.Parts = append(message.Parts, &icehousev1.ContentPart{Part: &icehousev1.ContentPart_Image{Image: image}})
	}
	if content != "" {
		message.Parts = append(message.Parts, &icehousev1.ContentPart{Part: &icehousev1.ContentPart_Text{Text: content}})
	}
	return message
}

// Image returns a picture for [Message] and [Conversation.Say]: a PNG, JPEG, WebP or GIF as it is in its file.
// mediaType is what it must be, such as "image/png"; empty for whatever its bytes say.
func Image(data []byte, mediaType string) *icehousev1.ImagePart {
	return &icehousev1.ImagePart{Source: &icehousev1.ImagePart_Data{Data: data}, MediaType: mediaType}
}

// Tool returns a function that the model may ask to be called, for GenerateRequest.Tools. parameters is the
// JSON schema of its arguments: whatever encodes to one, or nil for none.
func Tool(name, description string, parameters any) (*icehousev1.Tool, error) {
	tool := &icehousev1.Tool{Name: name, Description: description}
	if parameters == nil {
		return tool, nil
	}
	schema, err := json.Marshal(parameters)
	if err != nil {
		return nil, fmt.Errorf("icehouse: the parameters of tool %q: %w", name, err)
	}
	tool.ParametersJson = string(schema)
	return tool, nil
}

// ToolResult returns the turn of a conversation that answers a call.
func ToolResult(call *icehousev1.ToolCall, content string) *icehousev1.ChatMessage {
	return &icehousev1.ChatMessage{
		Role: "tool", Content: content, Name: &call.Name, ToolCallId: call.GetId(),
	}
}

// Inputs returns texts to embed, for EmbedRequest.Inputs.
func Inputs(texts ...string) []*icehousev1.EmbedInput {
	inputs := make([]*icehousev1.EmbedInput, len(texts))
	for i, text := range texts {
		inputs[i] = &icehousev1.EmbedInput{Input: &icehousev1.EmbedInput_Text{Text: text}}
	}
	return inputs
}

// JSONSchema returns the form of one JSON value that validates, for ResponseFormat.Format; [Reply.Decode]
// reads it. The order of properties is that of the schema.
func JSONSchema(schema string) *icehousev1.ResponseFormat_JsonSchema {
	return &icehousev1.ResponseFormat_JsonSchema{JsonSchema: schema}
}

// Choice returns the form of one of these texts, for ResponseFormat.Format.
func Choice(texts ...string) *icehousev1.ResponseFormat_Choice {
	return &icehousev1.ResponseFormat_Choice{Choice: &icehousev1.ChoiceFormat{Texts: texts}}
}
