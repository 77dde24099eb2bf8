"""SLURM: command `submit`, type `slurm` of kind `hook`, and the program that a batch script runs (`attempt`)."""
