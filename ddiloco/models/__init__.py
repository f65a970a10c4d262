"""The models that islands train. PURE."""
