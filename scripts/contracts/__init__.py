"""Contracts of this repository: read, validated, bound to tests, and tried with planted faults."""
