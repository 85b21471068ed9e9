"""Structured output: response formats compiled to grammars, and tokens matched against them."""
