"""Imported first by the fork server of `engines/forkserver.py`, for what that does to it.

A service manager, or Ctrl-C in a terminal, signals all processes of a run at once. Roles then bring
out their work; if their server ended at once they would end with it. It ends with its supervisor.
"""

import signal

SIGNALS = (signal.SIGINT, signal.SIGTERM)  # a forked process hears them again

for each in SIGNALS:
  signal.signal(each, signal.SIG_IGN)
