"""A call before it runs and its future: `@compute`, operators, options, the open pools of a process."""
