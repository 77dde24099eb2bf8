"""Networks of `forge-plugin-mot`."""
