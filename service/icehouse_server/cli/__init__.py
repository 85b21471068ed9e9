"""The `icehouse` command."""
