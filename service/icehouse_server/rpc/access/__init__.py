"""Access control: who calls, what proves it, and how much each tenant may run."""
