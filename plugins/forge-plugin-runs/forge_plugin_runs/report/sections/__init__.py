"""Sections of every report. Each is registered by an entry point, like the sections of other distributions."""
