"""Protobuf messages to domain data and back, and the validation of every field."""
