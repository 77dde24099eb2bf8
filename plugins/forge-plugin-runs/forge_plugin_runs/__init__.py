"""Commands that list, show, watch, resume, report and compare runs of Forge; logger `curves`; shell completion."""
