"""Values that users write and pools are made of: images, machines, launches, places of ranks."""
