package icehouse_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log"
	"os"
	"strings"
	"time"

	icehousev1 "icehouse.dev/api/icehouse/v1"
	"icehouse.dev/icehouse"
)

var (
	ctx    = context.Background()
	client *icehouse.Client
)

func ExampleDial() {
	client, err := icehouse.Dial("localhost:50051")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	if _, err := client.WaitReady(ctx); err != nil {
		log.Fatal(err)
	}
}

func ExampleClient_Generate() {
	prompt := icehouse.Chat(
		icehouse.System("You are brief."),
		icehouse.User("What is ice?"),
	)
	response, err := client.Generate(ctx, &icehousev1.GenerateRequest{Prompt: prompt, MaxOutputTokens: 40})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(response.GetText())
}

func ExampleClient_Stream() {
	stream := client.Stream(ctx, &icehousev1.GenerateRequest{Prompt: icehouse.Text("Once upon a time")})
	for text, err := range stream.Texts() {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(text)
	}
}

func ExampleStream_Events() {
	stream := client.Stream(ctx, &icehousev1.GenerateRequest{Prompt: icehouse.Chat(icehouse.User("What is ice?"))})
	for event, err := range stream.Events() {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(event.GetDelta().GetReasoning(), event.GetDelta().GetText())
	}
	reply, err := stream.Reply()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(reply.Finished.GetUsage().GetCachedTokens(), "tokens came from the cache")
}

func ExampleConversation() {
	talk := icehouse.NewConversation("You are brief.")
	for _, question := range []string{"What is ice?", "And steam?"} {
		talk.Say(question)
		response, err := client.Generate(ctx, talk.Request())
		if err != nil {
			log.Fatal(err)
		}
		talk.Add(icehouse.ReplyOf(response))
		fmt.Println(response.GetText())
	}
}

func ExampleTool() {
	weather, err := icehouse.Tool("get_weather", "Returns the weather in a city.", map[string]any{
		"type":       "object",
		"properties": map[string]any{"city": map[string]any{"type": "string"}},
	})
	if err != nil {
		log.Fatal(err)
	}
	talk := icehouse.NewConversation("")
	talk.Tools = []*icehousev1.Tool{weather}
	talk.Say("Is it raining in Oslo?")
	for {
		response, err := client.Generate(ctx, talk.Request())
		if err != nil {
			log.Fatal(err)
		}
		talk.Add(icehouse.ReplyOf(response))
		if len(response.GetToolCalls()) == 0 {
			fmt.Println(response.GetText())
			break
		}
		for _, call := range response.GetToolCalls() {
			fmt.Println(call.GetName(), call.GetArgumentsJson())
			talk.Answer(call, "dry, 12 °C")
		}
	}
}

func ExampleImage() {
	png, err := os.ReadFile("cube.png")
	if err != nil {
		log.Fatal(err)
	}
	prompt := icehouse.Chat(icehouse.User("What is this?", icehouse.Image(png, "image/png")))
	response, err := client.Generate(ctx, &icehousev1.GenerateRequest{Prompt: prompt})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(response.GetText())
}

func ExampleGenerateJSON() {
	type City struct {
		Name        string `json:"name"`
		Inhabitants int    `json:"inhabitants"`
	}
	request := &icehousev1.GenerateRequest{Prompt: icehouse.Text("The largest city of Norway: ")}
	city, _, err := icehouse.GenerateJSON[City](ctx, client, request)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(city.Name, city.Inhabitants)
}

func ExampleChoice() {
	response, err := client.Generate(ctx, &icehousev1.GenerateRequest{
		Prompt:         icehouse.Text("Is ice cold? "),
		ResponseFormat: icehouse.Choice("yes", "no"),
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(response.GetText())
}

func ExampleSchemaOf() {
	type City struct {
		Name string `json:"name"`
	}
	schema, err := icehouse.SchemaOf[City]()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(schema)
	// Output: {"type":"object","properties":{"name":{"type":"string"}},"required":["name"],"additionalProperties":false}
}

func ExampleReply_Decode() {
	response := &icehousev1.GenerateResponse{
		Text:         `{"city": "Oslo", "inhabitants": 717710}`,
		FinishReason: icehousev1.FinishReason_FINISH_REASON_STOP_TOKEN,
	}
	var city struct {
		City        string
		Inhabitants int
	}
	if err := icehouse.ReplyOf(response).Decode(&city); err != nil {
		log.Fatal(err)
	}
	fmt.Println(city.City, city.Inhabitants)
	// Output: Oslo 717710
}

func ExampleClient_Warm() {
	handbook := icehouse.Text("You answer from this handbook: ...")
	result, err := client.Warm(ctx, &icehousev1.WarmRequest{Prompt: handbook}, func(p *icehousev1.WarmProgress) {
		fmt.Println(p.GetProcessedTokens(), "of", p.GetPromptTokens(), "tokens")
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(result.GetCache().GetCachedTokens(), "tokens were in the cache already")

	explained, err := client.Explain(ctx, &icehousev1.ExplainRequest{Prompt: handbook})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(explained.GetCache().GetRamTokens(), "tokens would come from RAM")
}

func ExampleClient_Embed() {
	response, err := client.Embed(ctx, &icehousev1.EmbedRequest{Inputs: icehouse.Inputs("ice", "house")})
	if err != nil {
		log.Fatal(err)
	}
	for _, embedding := range response.GetEmbeddings() {
		fmt.Println(embedding.GetValues())
	}
}

func ExampleClient_ListRequests() {
	for request, err := range client.ListRequests(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(request.GetRequestId(), request.GetPhase(), request.GetAge().AsDuration())
	}
}

func ExampleClient_WatchStats() {
	for stats, err := range client.WatchStats(ctx, 5*time.Second) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(stats.GetEngine().GetOutputTokenTotal(), "tokens generated")
	}
}

func ExampleWithTokenSource() {
	token := func(context.Context) (string, error) {
		text, err := os.ReadFile("/run/secrets/icehouse-token")
		return strings.TrimSpace(string(text)), err
	}
	client, err := icehouse.Dial("models.example.com:8443",
		icehouse.WithTLS(&tls.Config{}),
		icehouse.WithTokenSource(token),
		icehouse.WithRetryLimit(3),
	)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
}

func ExampleError() {
	_, err := client.Generate(ctx, &icehousev1.GenerateRequest{Prompt: icehouse.Text("Hi")})
	var refused *icehouse.Error
	if errors.As(err, &refused) {
		switch refused.ErrorReason() {
		case icehousev1.ErrorReason_ERROR_REASON_QUEUE_FULL:
			delay, _ := refused.RetryAfter()
			fmt.Println("try again in", delay)
		case icehousev1.ErrorReason_ERROR_REASON_PROMPT_TOO_LONG:
			fmt.Println("too long:", refused.Metadata)
		default:
			fmt.Println(refused.Code, refused.Reason, refused.Field, refused.Message)
		}
	}
}
