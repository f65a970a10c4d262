"""How two roles talk: queues in one process, ZeroMQ between processes, and who may speak."""
