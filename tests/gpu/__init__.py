"""What is tried and measured on a GPU. `make gpu` runs it; every piece has a tiny form for the CPU."""
