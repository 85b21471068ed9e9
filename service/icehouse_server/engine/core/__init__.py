"""What the engine's rooms share: sequences, the mailbox, ports, counters. No policy."""
