"""The whole house minus mlx and sockets, on one thread and one seed."""
