"""Values of the hub: experiments, runs, points, roles. Standard library only."""
