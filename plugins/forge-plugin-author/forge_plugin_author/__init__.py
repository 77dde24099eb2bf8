"""For authors of Forge plugins: `forge-run new-plugin`, and the checks behind `forge-run plugins --check`."""
