"""The errors a caller may want to catch.

LongspanError
├── ConfigError        a setting, a size or a combination of them is wrong
├── UnsupportedError   the request is understood, and is refused by name
├── CheckpointError    a checkpoint cannot be saved, or cannot be used
├── DataError          a corpus, tokenizer or weight file cannot be used
├── NonFiniteError     a loss or a gradient is infinite or not a number
└── RankError          a process of a distributed run failed

Every message names the offending value and the fix, in one line; the command line prints it and exits with 2.
"""

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "LongspanError",
    "NonFiniteError",
    "RankError",
    "UnsupportedError",
]


class LongspanError(Exception):
    """Root of the errors that Longspan raises for its caller's input."""


class ConfigError(LongspanError):
    """A setting, a size or a combination of them is wrong."""


class UnsupportedError(LongspanError):
    """A feature that is understood and refused, rather than ignored or approximated."""


class CheckpointError(LongspanError):
    """A checkpoint cannot be saved, or one cannot be used."""


class DataError(LongspanError):
    """A corpus, a tokenizer or a weight file cannot be used."""


class NonFiniteError(LongspanError):
    """A loss or a gradient is infinite or not a number; the message says on which ranks, and where it began."""


class RankError(LongspanError):
    """A process of a distributed run failed; the message carries the first failure."""
