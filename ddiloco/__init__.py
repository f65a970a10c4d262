"""Decoupled DiLoCo in JAX: one large model trained across islands, far apart and failing."""

__version__ = "0.1.0"
