"""Checkpoints: written aside, committed by a rename, verified before they are loaded."""
