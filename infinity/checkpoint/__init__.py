"""Checkpoints: everything a run is made of, in files that outlive it."""
