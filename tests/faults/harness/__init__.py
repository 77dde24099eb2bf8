"""Kills real `forge-run` processes, starts them again, and compares with a run that nobody killed."""
