"""What every other room stands on and that knows none of them: processes, limits, signals, messages."""
