"""Stands in for a module that JupyterLab brings. jsonschema imports it if it is there, and Ray imports jsonschema.

The module compiles a grammar for more than a second. Each of the ten processes of a Ray cluster would do so.
"""

raise ImportError
