"""Service of this user: the file with which systemd or launchd runs `icehouse serve`, and its commands."""
