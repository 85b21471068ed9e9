"""Text: tokenizing, chat templates, and replies parsed as they stream."""
