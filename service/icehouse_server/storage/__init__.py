"""The SSD tier: the storage thread's directory of block files. Nothing here sees an mx.array or a request."""
