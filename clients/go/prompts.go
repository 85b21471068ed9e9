package icehouse

import (
	"encoding/json"
	"fmt"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

// Text returns a prompt of plain text.
func Text(text string) *icehousev1.Prompt {
	return &icehousev1.Prompt{Form: &icehousev1.Prompt_Text{Text: text}}
}

// Chat returns a prompt that is a conversation, oldest turn first.
func Chat(messages ...*icehousev1.ChatMessage) *icehousev1.Prompt {
	return &icehousev1.Prompt{Form: &icehousev1.Prompt_Chat{Chat: &icehousev1.ChatPrompt{Messages: messages}}}
}

// Tokens returns a prompt of token ids, which are used as they are.
func Tokens(ids ...int32) *icehousev1.Prompt {
	return &icehousev1.Prompt{Form: &icehousev1.Prompt_Tokens{Tokens: &icehousev1.TokenPrompt{Ids: ids}}}
}

// Infill returns a prompt with a gap between two texts, which the output fills. Only models that are trained for it
// accept it.
func Infill(prefix, suffix string) *icehousev1.Prompt {
	infill := &icehousev1.InfillPrompt{Prefix: prefix, Suffix: suffix}
	return &icehousev1.Prompt{Form: &icehousev1.Prompt_Infill{Infill: infill}}
}

// System returns a message with instructions for the whole conversation.
func System(text string) *icehousev1.ChatMessage {
	return &icehousev1.ChatMessage{Role: icehousev1.Role_ROLE_SYSTEM, Content: text}
}

// User returns a message of the user. Images come before the text.
func User(text string, images ...*icehousev1.ImagePart) *icehousev1.ChatMessage {
	message := &icehousev1.ChatMessage{Role: icehousev1.Role_ROLE_USER}
	if len(images) == 0 {
		message.Content = text
		return message
	}
	for _, image := range images {
		message.Parts = append(message.Parts, &icehousev1.ContentPart{Part: &icehousev1.ContentPart_Image{Image: image}})
	}
	if text != "" {
		message.Parts = append(message.Parts, &icehousev1.ContentPart{Part: &icehousev1.ContentPart_Text{Text: text}})
	}
	return message
}

// Assistant returns a message of the model, for an example or a conversation from elsewhere. For an answer of this
// server use [Reply.Message], which keeps its tokens.
func Assistant(text string) *icehousev1.ChatMessage {
	return &icehousev1.ChatMessage{Role: icehousev1.Role_ROLE_ASSISTANT, Content: text}
}

// ToolResult returns the message that answers a tool call.
func ToolResult(call *icehousev1.ToolCall, content string) *icehousev1.ChatMessage {
	return &icehousev1.ChatMessage{
		Role: icehousev1.Role_ROLE_TOOL, Content: content, Name: call.GetName(), ToolCallId: call.GetId(),
	}
}

// Image returns an image for [User] and [Conversation.Say]: the bytes of a PNG, JPEG, WebP or GIF file. The media type,
// such as "image/png", may be empty.
func Image(data []byte, mediaType string) *icehousev1.ImagePart {
	return &icehousev1.ImagePart{Source: &icehousev1.ImagePart_Data{Data: data}, MediaType: mediaType}
}

// Tool returns a function that the model may call, for the tools of a prompt or a [Conversation]. The parameters are
// the JSON schema of its arguments, as any value that encodes to it; nil for none.
func Tool(name, description string, parameters any) (*icehousev1.Tool, error) {
	tool := &icehousev1.Tool{Name: name, Description: description}
	if parameters == nil {
		return tool, nil
	}
	schema, err := json.Marshal(parameters)
	if err != nil {
		return nil, fmt.Errorf("icehouse: parameters of tool %q: %w", name, err)
	}
	tool.ParametersJson = string(schema)
	return tool, nil
}

// JSONSchema returns the format of a JSON value that matches a schema, in the schema's order of properties.
// [Reply.Decode] reads the output.
func JSONSchema(schema string) *icehousev1.ResponseFormat {
	return &icehousev1.ResponseFormat{Format: &icehousev1.ResponseFormat_JsonSchema{JsonSchema: schema}}
}

// Choice returns the format of an output that is one of these texts.
func Choice(texts ...string) *icehousev1.ResponseFormat {
	choice := &icehousev1.ChoiceFormat{Texts: texts}
	return &icehousev1.ResponseFormat{Format: &icehousev1.ResponseFormat_Choice{Choice: choice}}
}

// Inputs returns texts to embed, for EmbedRequest.Inputs.
func Inputs(texts ...string) []*icehousev1.EmbedInput {
	inputs := make([]*icehousev1.EmbedInput, len(texts))
	for i, text := range texts {
		inputs[i] = &icehousev1.EmbedInput{Input: &icehousev1.EmbedInput_Text{Text: text}}
	}
	return inputs
}
