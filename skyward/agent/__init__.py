"""The daemon on a node: it hosts slots and ranks, keeps blobs and ports, and relays frames and output.

It knows nothing of clients beyond their frames, and nothing of providers or engines.
"""
