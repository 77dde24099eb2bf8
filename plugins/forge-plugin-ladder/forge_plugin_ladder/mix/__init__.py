"""`forge-run data mix`: which mixture of sources to train on, by proxy runs."""
