"""The command `forge-run evaluate`, and `forge_plugin_lm_eval.model.ForgeLM`, a model for lm-evaluation-harness."""
