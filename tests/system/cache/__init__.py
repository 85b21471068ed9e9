"""The prefix cache end to end: engine, device, RAM and SSD together on tiny real models."""
