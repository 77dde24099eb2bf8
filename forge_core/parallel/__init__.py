"""Layout and mesh of the ranks, the stages that transform a model for them, and its initialisation."""
