"""What learners and syncer shards say and decide. PURE: no arrays, no clocks, no I/O."""
