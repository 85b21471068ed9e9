"""A tensor-parallel group on one machine: shown at work, and measured against one process."""
