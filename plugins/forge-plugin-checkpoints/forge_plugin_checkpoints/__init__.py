"""The command `forge-run checkpoints`: list, verify, compare, export and delete checkpoints of a Forge run."""
