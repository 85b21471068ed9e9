"""A tensor-parallel group: rank 0 serves and decides, the other ranks do what its engine does."""
