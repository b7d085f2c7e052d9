"""The hub's own REST API, `/v1`."""
