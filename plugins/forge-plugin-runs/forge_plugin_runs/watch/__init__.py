"""`forge-run watch`: follows runs while they train, here or on another host."""
