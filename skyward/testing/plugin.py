"""The pytest plugin. Loaded by every pytest run in an environment that has skyward: it imports nothing heavy."""
