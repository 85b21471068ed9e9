"""The HTTP front of a real server: `icehouse-http` as its child."""
