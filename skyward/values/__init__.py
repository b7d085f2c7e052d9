"""Values that users write and pools consist of: images, secrets, machines, launches, ranks."""
