"""Every test runs on the CPU with eight fake devices; see ddiloco/environment.py for why so."""

from ddiloco import environment

environment.prepare(num_cpu_devices=8, cpu_only=True)
