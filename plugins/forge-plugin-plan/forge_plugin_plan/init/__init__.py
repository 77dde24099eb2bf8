"""The command `forge-run init`: a first job for your data, with sizes for your machine and time."""
