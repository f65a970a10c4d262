"""Nothing is lost: snapshots, a buddy's copies, weights at rest, and what a run goes on from."""
