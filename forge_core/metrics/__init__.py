"""The core's loggers, and the peak speed of devices."""
