"""Operations of the hub. Each takes an `Actor`, checks its rights, and owns its transaction."""
