"""KV in pages: the pool that holds it, the tables of the rows, and what of it the prefix cache keeps."""
