"""The order of samples, and their way from the sources to batches on the device."""
