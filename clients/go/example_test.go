package icehouse_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log"
	"os"
	"strings"

	"google.golang.org/grpc/codes"

	icehousev1 "icehouse.dev/api/icehouse/v1"
	"icehouse.dev/icehouse"
)

func ExampleClient_Stream() {
	client, err := icehouse.Dial("localhost:50051")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	stream := client.Stream(context.Background(), &icehousev1.GenerateRequest{
		Prompt: icehouse.Chat(icehouse.Message("user", "Say hello.")),
	})
	for text, err := range stream.Texts() {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(text)
	}
}

func ExampleClient_Warm() {
	client, err := icehouse.Dial("localhost:50051")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	request := &icehousev1.GenerateRequest{Prompt: icehouse.Text("You answer from the handbook: ...")}
	if _, err := client.Warm(context.Background(), request); err != nil {
		log.Fatal(err)
	}
	explained, err := client.Explain(context.Background(), request)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(explained.GetCache().GetRamTokens(), "tokens will come from RAM")
}

func ExampleImage() {
	client, err := icehouse.Dial("localhost:50051")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	png, err := os.ReadFile("cube.png")
	if err != nil {
		log.Fatal(err)
	}
	talk := icehouse.NewConversation("")
	talk.Say("What is in this picture?", icehouse.Image(png, "image/png"))
	response, err := client.Generate(context.Background(), talk.Request())
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(response.GetText(), response.GetUsage().GetImageTokens())
}

func ExampleConversation() {
	client, err := icehouse.Dial("localhost:50051")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	weather, err := icehouse.Tool("get_weather", "Tells the weather.", map[string]any{
		"type":       "object",
		"properties": map[string]any{"city": map[string]any{"type": "string"}},
	})
	if err != nil {
		log.Fatal(err)
	}
	talk := icehouse.NewConversation("Be brief.")
	talk.Tools = []*icehousev1.Tool{weather}
	talk.Say("Is it raining in Oslo?")
	for {
		response, err := client.Generate(context.Background(), talk.Request())
		if err != nil {
			log.Fatal(err)
		}
		reply := icehouse.ReplyOf(response)
		talk.Add(reply)
		if len(reply.ToolCalls) == 0 {
			fmt.Println(reply.Text)
			return
		}
		for _, call := range reply.ToolCalls {
			talk.Answer(call, "dry")
		}
	}
}

func ExampleGenerateJSON() {
	client, err := icehouse.Dial("localhost:50051")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	type City struct {
		Name        string `json:"name"`
		Inhabitants int    `json:"inhabitants"`
	}
	request := &icehousev1.GenerateRequest{Prompt: icehouse.Text("The largest city of Norway: ")}
	city, _, err := icehouse.GenerateJSON[City](context.Background(), client, request)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(city.Name, city.Inhabitants)
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

func ExampleWithTokenSource() {
	source := func(context.Context) (string, error) {
		token, err := os.ReadFile("/run/secrets/icehouse-token")
		return strings.TrimSpace(string(token)), err
	}
	client, err := icehouse.Dial(
		"models.example.com:8443", icehouse.WithTLS(&tls.Config{}), icehouse.WithTokenSource(source),
	)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
}

func ExampleError() {
	client, err := icehouse.Dial("localhost:50051", icehouse.WithRetryLimit(3))
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	_, err = client.Generate(context.Background(), &icehousev1.GenerateRequest{Prompt: icehouse.Text("Hi")})
	var refused *icehouse.Error
	if errors.As(err, &refused) && refused.Code == codes.ResourceExhausted {
		delay, _ := refused.RetryAfter()
		fmt.Println("full:", refused.Reason, "come back in", delay)
	}
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
