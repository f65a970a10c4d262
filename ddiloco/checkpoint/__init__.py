"""Snapshots, a buddy's copies, weights at rest, and how a run goes on from them."""
