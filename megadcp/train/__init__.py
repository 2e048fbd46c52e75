"""The life of a run: loop, state, checkpoints, log."""
