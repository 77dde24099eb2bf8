"""Evaluation: tasks during training, and the tasks of lm-evaluation-harness and lmms-eval on checkpoints."""
