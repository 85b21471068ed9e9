"""Core of the engine, which its rooms share: sequences, the mailbox, ports, counters. No policy."""
