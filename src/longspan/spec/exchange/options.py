"""What a run may choose about a transport beside its name."""

from dataclasses import dataclass

from longspan.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """Settings of transports; a transport that has no use for one ignores it.

    Attributes:
        inner: ranks that trade heads, for "all_to_all+…"; neighbours in the cp group.
        head_groups: groups of heads that travel one after the other: K/V heads of an all-gather, all heads of an
            all-to-all.
        stages: exchanges that "needed" spreads its messages over, each hidden under the work of the one before.
        direct_gradients: the ring's gradients go home in one hop each, instead of being added to on the way. Then
            a narrow wire dtype rounds every part once, however long the ring is.

    Raises:
        ConfigError: a number below one.
    """

    inner: int = 1
    head_groups: int = 1
    stages: int = 2
    direct_gradients: bool = False

    def __post_init__(self) -> None:
        """Refuse numbers that count nothing."""
        for name in ("inner", "head_groups", "stages"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


DEFAULT = Options()
