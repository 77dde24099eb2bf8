"""lm-evaluation-harness: the command `forge-run evaluate`, and its model `ForgeLM` (module `model`)."""
