"""One file a verb. A file declares options; its body imports what it needs and calls a stage."""
