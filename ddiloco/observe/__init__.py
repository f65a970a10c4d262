"""What happened in a run: the event logs, and everything that is computed from them."""
