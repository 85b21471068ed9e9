"""Agent programs as they are, led through a task by a scripted model behind the HTTP front."""
