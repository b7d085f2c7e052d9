"""Many agents as one engine, and the keeper that ends them when the client dies."""
