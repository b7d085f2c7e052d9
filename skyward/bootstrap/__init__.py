"""From a machine that answers to one where an agent can start: environments, code, pre-flight checks."""
