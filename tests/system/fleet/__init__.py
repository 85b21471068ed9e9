"""Real gateways in front of real servers, and the clients that people have: `make test-fleet`."""
