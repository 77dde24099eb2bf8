"""The run loop and what it is made of."""
