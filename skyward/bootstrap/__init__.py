"""Steps from a bare machine to one where an agent can start: environments, code, pre-flight checks."""
