"""`python -m ddiloco` is the command `ddiloco`."""

from ddiloco.cli import entry

entry()
