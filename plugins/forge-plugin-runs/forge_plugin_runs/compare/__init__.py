"""`forge-run compare`: runs of several jobs and settings, side by side."""
