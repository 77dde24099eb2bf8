"""For authors of Forge plugins: `forge-run new-plugin`, `forge-run schema`, and `forge-run plugins` with its checks."""
