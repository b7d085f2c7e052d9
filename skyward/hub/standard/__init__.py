"""Operations that every hub knows: what they take, and their functions, which run on the nodes of jobs."""
