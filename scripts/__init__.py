"""What a user of the wheel never calls. From the checkout: `python -m scripts.<topic>.<name>`."""
