"""A program of the standard library alone, run by `sandbox` and never imported by the package."""
