"""Training: a model and a layout made one, the loss, the loop and what it reports."""
