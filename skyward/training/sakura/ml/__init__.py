"""Module path of `async_trainer` in Sakura."""
