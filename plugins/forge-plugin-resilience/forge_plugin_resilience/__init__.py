"""Long runs: goodput, a fire drill, silent data corruption, loss spikes, and the health of machines."""
