"""For authors of Forge plugins: `forge-run new-plugin`, `explain`, `explain schema`, and `plugins` with its checks."""
