"""Service of this user: the file that has systemd or launchd run `icehouse serve`, commands about it."""
