"""The trace in the event logs: checked, replayed bit by bit, shown as text."""
