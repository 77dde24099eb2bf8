"""Files of data: found, cached, checked, and read as tokens."""
