"""Work that all ranks do together, and that ends with the same error on all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from longspan.errors import CheckpointError, LongspanError

__all__ = ["Together", "os_error"]

Mine = TypeVar("Mine")
Share = TypeVar("Share")


@dataclass(frozen=True)
class _Failure:
    """What went wrong first, on which rank."""

    rank: int
    kind: type[LongspanError]
    words: str


@dataclass(frozen=True, eq=False)
class Together:
    """All ranks of a run over a gloo group of their own, so that training's collectives may go on beside them.

    Attributes:
        rank: this process's global rank.
        world: number of ranks.
        group: None for a world of one.
    """

    rank: int
    world: int
    group: dist.ProcessGroup | None

    @classmethod
    def create(cls, rank: int, world: int, timeout_s: float) -> "Together":
        """Make the group; every rank of the running world calls it together.

        Args:
            rank: this process's global rank.
            world: number of ranks; one needs no group.
            timeout_s: seconds that a rank waits for another.
        """
        if world == 1:
            return cls(rank, world, None)
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup), "the world is the group"
        return cls(rank, world, group)

    def close(self) -> None:
        """Give the group up; nothing may be under way in it."""
        if self.group is not None:
            dist.destroy_process_group(self.group)

    def through_rank_0(
        self,
        mine: Callable[[], Mine],
        join: Callable[[list[Mine]], list[Share]],
        *,
        doing: str,
        fix: str,
    ) -> Share:
        """Let each rank do its part and rank 0 join the parts; each rank gets its share of what comes out.

        Args:
            mine: called on each rank.
            join: called on rank 0 with the results in rank order; returns one share for each rank.
            doing: what this is, for the error ("saving step 3").
            fix: what to do about an error of the operating system.

        Raises:
            LongspanError: the first failure of any rank, in the same words on all ranks.
            Exception: a fault of ours, on the rank that has it; the others name it in a CheckpointError.
        """
        done, own_fault = self._attempt(mine, doing, fix)
        parts = self._gather(done)
        shares: list[Any] = []
        if parts is not None:
            failed = next((part for part in parts if isinstance(part, _Failure)), None)
            if failed is None:
                joined, own_fault = self._attempt(lambda: join(parts), doing, fix)
                shares = [joined] * self.world if isinstance(joined, _Failure) else joined
            else:
                shares = [failed] * self.world
        share = self._scatter(shares)
        if not isinstance(share, _Failure):
            return share
        if own_fault is not None and share.rank == self.rank:
            raise own_fault
        raise share.kind(share.words)

    def agree(self, mine: Callable[[], Any], *, doing: str, fix: str) -> None:
        """Let each rank do something; all ranks raise the first failure of any."""
        self.through_rank_0(mine, lambda parts: [None] * len(parts), doing=doing, fix=fix)

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        if self.group is None:
            return number
        tensor = torch.tensor(number)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return int(tensor)

    def _attempt(self, work: Callable[[], Any], doing: str, fix: str) -> tuple[Any, Exception | None]:
        try:
            return work(), None
        except LongspanError as error:
            return _Failure(self.rank, type(error), str(error)), None
        except Exception as error:
            if (cause := os_error(error)) is None:
                words = f"{doing} failed on rank {self.rank}: {type(error).__name__}: {error}"
                return _Failure(self.rank, CheckpointError, words), error
            where = f" ({cause.filename})" if cause.filename else ""
            words = f"{doing} failed on rank {self.rank}: {cause.strerror or cause}{where}; {fix}"
            return _Failure(self.rank, CheckpointError, words), None

    def _gather(self, part: Any) -> list[Any] | None:
        if self.group is None:
            return [part]
        parts: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(part, parts, dst=0, group=self.group)
        return parts

    def _scatter(self, shares: list[Any]) -> Any:
        if self.group is None:
            return shares[0]
        share: list[Any] = [None]
        dist.scatter_object_list(share, shares if self.rank == 0 else None, src=0, group=self.group)
        return share[0]


def os_error(error: BaseException | None) -> OSError | None:
    """The operating system's refusal behind an error, if that is what it comes from: torch hides it in its own."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
