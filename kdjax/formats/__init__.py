"""Checkpoint files: lazy tensor tables with one interface."""
