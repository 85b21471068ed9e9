"""Object store beyond the SSD tier, shared by servers: what one computed, another one fetches."""
