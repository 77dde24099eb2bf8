"""Memory, computation and communication of one step of a job, on ranks that need not exist."""
