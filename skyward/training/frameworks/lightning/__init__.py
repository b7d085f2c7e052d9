"""Lightning's `Trainer`: our callbacks in it, evaluations beside it, and our checkpoints as its own."""
