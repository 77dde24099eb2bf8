"""The command `forge-run doctor`: checks whether this machine is fit for training with Forge, and suggests fixes."""
