"""From a QuantizedCheckpoint to an Engine: fuse, plan, pack, tune, write."""
