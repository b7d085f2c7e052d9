"""Launchers and runners: the part of a hub that opens pools. It may run on other machines than the server."""
