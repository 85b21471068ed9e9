"""Text: tokenizing, chat templates, and replies parsed as they stream.

Prompt:  Conversation -> ChatRenderer: `fit` adapts the turns to TemplateTraits, which probes determined once
         -> ChatTemplate: the text -> TurnTokens: its tokens, with those of earlier replies as they were drawn
Reply:   tokens -> Detokenizer: text -> ReplySplitter: the layout of the ReplyFormat splits it into text,
         reasoning and sections of calls -> Notation reads the calls -> ArgumentsSchema checks them -> pieces
"""
