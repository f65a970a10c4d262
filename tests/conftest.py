"""Every test runs on the CPU with eight fake devices; see ddiloco/environment.py for why so."""

import signal

from ddiloco import environment

environment.prepare(num_cpu_devices=8, cpu_only=True)

# A shell starts what runs in its background with SIGINT ignored, which the processes of tests about
# Ctrl-C would inherit.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)
