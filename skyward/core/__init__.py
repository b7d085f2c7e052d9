"""Processes, limits, signals and messages: the base that every other room builds on."""
