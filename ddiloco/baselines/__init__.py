"""The baseline for comparisons: synchronous data-parallel over the same islands."""
