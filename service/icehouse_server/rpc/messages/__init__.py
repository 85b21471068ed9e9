"""Messages: protobuf to domain data and back, with the validation of every field."""
