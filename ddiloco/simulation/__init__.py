"""Virtual time: a run without arrays, chips that fail, bandwidth, and plans."""
