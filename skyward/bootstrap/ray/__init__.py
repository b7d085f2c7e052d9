"""Programs on a Ray cluster: a driver on one machine, a bridge on each node, and a stub that leads to both.

They run in the cluster's Python, where skyward is not installed. So they import each other, parts of `wire` that
stand alone, and Ray. `files` sends them.
"""
