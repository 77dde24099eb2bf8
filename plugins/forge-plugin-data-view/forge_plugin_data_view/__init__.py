"""The commands `forge-run data` and `look`: what a Forge job trains on, as text with counts, and as a picture."""
