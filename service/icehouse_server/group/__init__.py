"""A tensor-parallel group: rank 0 serves and decides, the other ranks repeat what its engine does."""
