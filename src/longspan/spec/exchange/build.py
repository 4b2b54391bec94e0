"""Writing the program that a transport's name stands for."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal, get_args

from longspan.errors import ConfigError
from longspan.spec.exchange.all_gather import all_gather
from longspan.spec.exchange.heads import Reshard
from longspan.spec.exchange.needed import needed
from longspan.spec.exchange.needs import Needs
from longspan.spec.exchange.options import DEFAULT, Options
from longspan.spec.exchange.program import Exchange
from longspan.spec.exchange.ring import ring
from longspan.spec.exchange.steps import Program
from longspan.spec.mask import Mask
from longspan.spec.sharding import Sharding

Transport = Literal[
    "ring",
    "all_gather",
    "needed",
    "all_to_all",
    "all_to_all+ring",
    "all_to_all+all_gather",
    "all_to_all+needed",
]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)

SEQUENCE: dict[str, Callable[[Needs, int, Options], Program]] = {
    "ring": ring,
    "all_gather": all_gather,
    "needed": needed,
}


def build(
    mask: Mask, sharding: Sharding, rank: int, transport: Transport = "ring", options: Options = DEFAULT
) -> Exchange:
    """Write the program of one rank for one mask under one sharding.

    Args:
        mask: which keys each query sees.
        sharding: which cp rank owns which tokens.
        rank: place in the cp group.
        transport: how rows reach other ranks. "all_to_all" trades tokens for heads over the whole group;
            "all_to_all+X" does so among `options.inner` neighbours and uses X between such groups.
        options: settings of the transport.

    Raises:
        ConfigError: mask and sharding of different lengths, an unknown transport, or groups that do not divide cp.
    """
    return _programs(mask, sharding, (rank,), transport, options)[0]


def build_all(
    mask: Mask, sharding: Sharding, transport: Transport = "ring", options: Options = DEFAULT
) -> tuple[Exchange, ...]:
    """The programs of all ranks, to compare or to draw them; raises what `build` raises."""
    return _programs(mask, sharding, range(sharding.cp), transport, options)


def inner_size(transport: str, cp: int, options: Options = DEFAULT) -> int:
    """Ranks that trade heads with each other.

    Raises:
        ConfigError: an unknown transport, or a size that does not divide cp.
    """
    if transport not in TRANSPORTS:
        raise ConfigError(f"unknown transport {transport!r}; use one of {', '.join(TRANSPORTS)}")
    if transport in SEQUENCE:
        return 1
    inner = cp if transport == "all_to_all" else options.inner
    if cp % inner:
        raise ConfigError(f"{transport}: groups of {inner} ranks do not divide cp={cp}")
    return inner


def _programs(
    mask: Mask, sharding: Sharding, ranks: Iterable[int], transport: Transport, options: Options
) -> tuple[Exchange, ...]:
    if mask.tokens != sharding.tokens:
        raise ConfigError(f"the mask covers {mask.tokens} tokens, the sharding {sharding.tokens}")
    inner = inner_size(transport, sharding.cp, options)
    outer = sharding.grouped(inner)
    needs, num_rows = Needs(mask, outer), tuple(outer.num_tokens(group) for group in range(outer.cp))
    sequence = SEQUENCE.get(transport.split("+")[-1], ring)
    # Heads that are traded in groups are not gathered in groups once more.
    outside = options if inner == 1 else replace(options, head_groups=1)
    found = []
    for rank in ranks:
        group = rank // inner
        written = sequence(needs, group, outside)
        own = tuple(sharding.num_tokens(group * inner + member) for member in range(inner))
        reshard = Reshard(rank % inner, own, options.head_groups) if inner > 1 else None
        found.append(
            Exchange(
                transport=transport,
                rank=group,
                num_rows=num_rows,
                padded_rows=written.padded_rows,
                forward=written.forward,
                backward=written.backward,
                parts=written.parts,
                reshard=reshard,
            )
        )
    return tuple(found)
