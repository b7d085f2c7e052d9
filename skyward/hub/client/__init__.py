"""Half of the hub that runs where training runs: spool, sender and runs. It needs no extra."""
