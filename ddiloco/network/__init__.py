"""How two roles talk: queues in one process, TCP and TLS between processes, and who may speak."""
