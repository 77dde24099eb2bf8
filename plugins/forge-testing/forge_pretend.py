"""What torch calls when it is imported, as it does for vendors' packages: the entry point group `torch.backends`."""

import os

VARIABLE = "FORGE_PRETEND"
"""Set to 1, it gives every process that imports torch the device of `forge_testing.pretend`."""


def load() -> None:
    """Register the pretended device, if the environment asks for it; else this costs nothing."""
    if os.environ.get(VARIABLE) == "1":
        import forge_testing.pretend as device

        if "register" in vars(device):  # else it is just importing torch, and calls this at its end
            device.register()
