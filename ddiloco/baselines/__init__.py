"""What the project is measured against: synchronous data-parallel over the same islands."""
