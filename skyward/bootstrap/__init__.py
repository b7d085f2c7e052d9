"""From a bare machine to one that runs tasks: environments, the user's code, and what may be kept there.

    probe      one round trip: what the node is, and what it has already
    uv, python, skyward, packages      what it lacks is made, in one more

Nothing here knows how the node is reached: see `Runner`.
"""
