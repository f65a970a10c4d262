"""Islands and shards in a cloud: pure modules render what is asked for, `cloud.py` asks for it."""
