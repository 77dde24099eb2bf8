"""Commands `forge-run data` and `data picture`: what a Forge job trains on, as text with counts, and as a picture."""
