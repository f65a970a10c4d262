"""What happened: the event log, and everything that is made of it."""
