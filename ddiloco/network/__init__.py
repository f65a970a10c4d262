"""Transports between roles: queues in one process, TCP and TLS between processes, and keys."""
