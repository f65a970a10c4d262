"""The event log as proof: checked, replayed bit by bit, read as text."""
