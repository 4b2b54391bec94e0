"""What all ranks decide together between a step's gradients and its update: whether to make it, whether to stop."""

import math

from longspan.errors import NonFiniteError
from longspan.train.failure.diagnosis import diagnose
from longspan.train.failure.stopping import Stop, on_any_rank
from longspan.train.forward import ParallelModel
from longspan.train.session import Session, StepBatches

__all__ = ["StepGuard"]


class StepGuard:
    """The guard of one run; every rank has one and asks it in the same steps.

    Args:
        session: its run file says what to do about losses and gradients that are not finite.
        model: the model that is trained.
        stop: whether this process was asked to stop.

    Attributes:
        stopping: all ranks stop after this step.
        nonfinite: why the last step asked about was left out, or None.
    """

    def __init__(self, session: Session, model: ParallelModel, stop: Stop) -> None:
        self._session, self._model, self._stop = session, model, stop
        self._in_a_row = 0
        self.stopping = False
        self.nonfinite: str | None = None

    def allows(self, batches: StepBatches, loss: float, norm: float) -> bool:
        """Whether the weights may be updated.

        Costs an all-reduce of two bytes.

        Args:
            batches: the step, whose gradients the model has.
            loss: the step's loss.
            norm: global norm of the gradients.

        Raises:
            NonFiniteError: the loss or the norm is not finite on some rank, and the run file says to stop, or has
                skipped too many steps in a row; in the same words on all ranks.
        """
        broken = not (math.isfinite(loss) and math.isfinite(norm))
        self.stopping, broken = on_any_rank(self._session.groups, self._stop.requested, broken)
        self.nonfinite = None
        if not broken:
            self._in_a_row = 0
            return True
        self._in_a_row += 1
        train, stage = self._session.config.train, self._session.plan.stage_of(batches.step)
        what = f"step {batches.step + 1}: {diagnose(self._model, batches, stage, loss, norm)}"
        if train.nonfinite == "stop":
            raise NonFiniteError(f"{what}; lower optimizer.lr or lengthen schedule.warmup_tokens")
        if self._in_a_row >= train.nonfinite_limit:
            raise NonFiniteError(
                f"{what}; this is the last of train.nonfinite_limit={train.nonfinite_limit} such steps in a row, so "
                "the run cannot recover"
            )
        self.nonfinite = what
        return False
