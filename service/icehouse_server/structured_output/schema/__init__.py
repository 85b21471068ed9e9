"""JSON schemas as people's libraries write them, rewritten to the keywords that a grammar can keep."""
