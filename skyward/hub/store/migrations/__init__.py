"""Migrations of the hub's tables, forward only: a release may add and fill before a later one removes."""
