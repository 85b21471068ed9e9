"""The `icehouse` command: the composition root, where configuration becomes objects."""
