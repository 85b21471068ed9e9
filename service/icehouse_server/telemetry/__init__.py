"""What operators look at: metrics in one table, their Prometheus endpoint, OpenTelemetry spans."""
