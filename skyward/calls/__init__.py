"""Calls before they run, and their futures: `@compute`, operators, options, the open pools of a process."""
