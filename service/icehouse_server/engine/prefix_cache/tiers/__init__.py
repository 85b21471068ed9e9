"""The tiers of the prefix cache as the inference thread sees them: index, RAM, eviction, spills."""
