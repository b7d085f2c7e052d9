"""Processes on a node: the agent with its watchdog, and the slots and ranks below it."""
