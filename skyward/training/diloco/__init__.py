"""Training across machines without a fast network: DiLoCo's arithmetic, schedule and rounds, as pure state machines.

Each worker trains alone for H inner steps. A server then averages their progress, takes one outer step, and every
worker goes on from the result. No server and no worker is here yet.

Papers: DiLoCo (arXiv 2311.08105), asynchronous local SGD (arXiv 2401.09135), Streaming DiLoCo (arXiv 2501.18512).
"""
