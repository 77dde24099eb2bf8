"""Memory, computation and communication of a job's step, on ranks that need not exist; and checks of this machine."""
