"""Identity of a served model: its fingerprint, over its weights and the code that computes its KV."""
