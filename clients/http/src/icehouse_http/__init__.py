"""OpenAI's and Anthropic's HTTP APIs in front of an Icehouse server."""
