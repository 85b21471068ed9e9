"""Identity of a served model: its fingerprint, over its weights and over the code that computes its KV."""
