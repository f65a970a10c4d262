"""The paper's arithmetic on plain arrays. PURE."""
