"""The command `forge-run doctor`: is this machine fit for training with Forge, and if not, what mends it?"""
