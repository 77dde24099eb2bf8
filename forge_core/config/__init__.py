"""The job: its tables, how they are read from TOML, checked, and written back."""
