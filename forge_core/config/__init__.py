"""The job: how its tables are read from TOML, checked, and written back."""
