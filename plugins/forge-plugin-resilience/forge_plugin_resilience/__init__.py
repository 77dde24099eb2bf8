"""Long runs: goodput, fault injection, silent data corruption, loss spikes, and health checks of machines."""
