"""What every command prints with: the console, errors on it, logs."""
