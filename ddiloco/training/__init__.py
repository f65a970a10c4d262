"""One island's work: its devices, its compiled step, its data."""
