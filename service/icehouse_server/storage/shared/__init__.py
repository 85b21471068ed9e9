"""Object store behind the SSD tier, shared by servers: what one computed, another one fetches."""
