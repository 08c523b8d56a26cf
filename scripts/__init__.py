"""Programs of the checkout, not of the wheel: `python -m scripts.<topic>.<name>`."""
