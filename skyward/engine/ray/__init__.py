"""Links to nodes by Ray: an actor on each node, and a driver beside the head, which pass bytes without reading them."""
