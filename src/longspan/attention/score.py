"""How a query and a key make a score, beside their product."""

from dataclasses import dataclass

from longspan.errors import ConfigError


@dataclass(frozen=True)
class Score:
    """score = scale · q·k, or softcap · tanh(scale · q·k / softcap).

    Attributes:
        scale: factor, usually 1/√D.
        softcap: bound on the score's size (Gemma 2, arXiv 2408.00118, section 2), or None.

    Raises:
        ConfigError: a softcap that is not positive.
    """

    scale: float
    softcap: float | None = None

    def __post_init__(self) -> None:
        """Refuse caps that cap nothing."""
        if self.softcap is not None and self.softcap <= 0:
            raise ConfigError(f"softcap must be positive, got {self.softcap}; leave it out for none")
