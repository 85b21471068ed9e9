"""What commands of the server print while they work: logs, and the progress of building a demo model."""
