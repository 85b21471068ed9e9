"""Plain data that crosses between the rooms: frozen, slotted, without mlx, grpc or sqlite."""
