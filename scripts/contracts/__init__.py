"""Contracts of this repository: validated, bound to tests, and tried with planted faults."""
