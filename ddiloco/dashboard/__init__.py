"""Mission control, the dashboard: one page about a run, from its workdir alone."""
