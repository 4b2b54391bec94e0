"""Plan, train, measure and verify transformers on sequences too long for one device."""

__version__ = "0.1.0"
