"""The effects around the pure protocol: a learner, a syncer shard and the evaluator at work."""
