"""`make bench CASE=gpu`: the server over gRPC against mlx-lm's engine in process, with models of real shapes.

`shapes` makes a model on the spot, `callers` are the clients, `cases` what is measured, `targets` what it is
judged by, `exact` whether replies are equal, `passes` what the server's passes were. It runs on any device;
the targets are those of a GPU.
"""
