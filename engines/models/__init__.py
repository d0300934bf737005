"""Model families: deltas on one decoder program."""
