"""Starting runs: SLURM jobs that continue after preemptions and failures, and elastic restarts on one machine."""
