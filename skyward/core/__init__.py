"""Processes, limits, signals and messages: the base of every other room, without knowledge of any of them."""
