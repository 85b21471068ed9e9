"""The services of the API, one module each, and what they share."""
