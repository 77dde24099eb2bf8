"""`forge-run watch`: runs as they go on, here or on another host."""
