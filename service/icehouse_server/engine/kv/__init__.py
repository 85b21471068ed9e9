"""KV in pages: their pool, the page tables of rows, and the blocks that the prefix cache shares with them."""
