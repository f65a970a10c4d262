"""Mission control: one page about a run, from its workdir alone."""
