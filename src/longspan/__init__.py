"""Train transformers on sequences too long for one device, and prove that the run is right."""

__version__ = "0.1.0"
