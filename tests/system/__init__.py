"""The server as a whole: simulation, crashes, load, meshes, clients, deployment."""
