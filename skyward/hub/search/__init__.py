"""Sweeps: a driver asks for parameters, runs trials on a pool or as jobs, and tells how they ended."""
