"""Profiles of a window of steps: type `profile` of kind `hook`, and the command `forge-run profile`."""

from forge_plugin_profile.profile import Profile

__all__ = ["Profile"]
