"""JSON schemas as libraries write them, rewritten to keywords that a grammar can enforce."""
