"""The HTTP door of a real server: `icehouse-http` as its child."""
