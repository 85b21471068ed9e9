"""What commands of the server tell while they work: logs, and how a demo model comes to be."""
