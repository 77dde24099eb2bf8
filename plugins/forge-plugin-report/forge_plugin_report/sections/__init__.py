"""Sections of every report. Each is named by an entry point, like those of other distributions."""
