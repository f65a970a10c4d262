"""The messages and decisions of learners and syncer shards. PURE: no arrays, no clocks, no I/O."""
