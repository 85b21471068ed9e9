"""Notations of tool calls, each read as it comes."""
