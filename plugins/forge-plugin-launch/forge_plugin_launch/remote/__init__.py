"""For clusters whose nodes do not see this machine's files: checks before a run is sent, and calls of programs."""
