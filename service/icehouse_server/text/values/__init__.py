"""Values of tool calls: from the text that a model writes to JSON that its tool takes."""
