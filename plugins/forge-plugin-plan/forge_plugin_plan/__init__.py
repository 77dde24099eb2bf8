"""What a job will take on ranks that need not exist: memory, computation and communication of one step."""
