"""Islands and shards on a cloud's machines: what is asked of it is rendered purely, then done."""
