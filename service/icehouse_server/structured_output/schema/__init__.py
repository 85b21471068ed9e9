"""JSON schemas as libraries write them, rewritten to the keywords that a grammar can enforce."""
