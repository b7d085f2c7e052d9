"""Runs that are remembered: a tracking server that speaks MLflow's protocol, and the client that feeds it."""
