"""The command `forge-run data`: what a Forge job trains on, decoded sample by sample, with counts per source."""
