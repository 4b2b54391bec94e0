"""`verify`: one run, two ways, compared in float64 and in the run's own dtype."""

from collections.abc import Generator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

from longspan.errors import ConfigError
from longspan.train.session import Session
from longspan.verify.compare import Check, Outcome, Report, parameter_errors, relative_error
from longspan.verify.runs import definition_run, layout_run
from longspan.verify.sabotage import Sabotage, find_sabotage

__all__ = ["verify"]

GRADIENT_BOUND = 1e-10
LOSS_BOUND = 1e-12
# In a narrower dtype the layout may err this many times as much as one process does.
NARROW_FACTOR = 2.0


def verify(session: Session, sabotage: str | None = None) -> Report | None:
    """Compare the session's layout with one process on its own model and first batches.

    Compared in float64: loss, evaluation loss, every parameter's gradient, and all parameters after three optimizer
    steps, against a dense-mask reference. In the run's dtype, the layout's error against that reference is held to
    twice one process's error in that dtype. Costs five short runs; the reference holds the whole model on rank 0.

    Args:
        session: every rank of the layout calls with its own.
        sabotage: name of a fault to put into the layout's path, which then must be caught.

    Returns:
        The report on rank 0, None elsewhere.

    Raises:
        ConfigError: an unknown sabotage, or one that this run cannot show, with the reason.
    """
    fault = _checked(session, sabotage)
    narrow = session.config.train.dtype
    with fault.apply(session) if fault else nullcontext():
        wide_run = layout_run(session, "float64")
        narrow_run = layout_run(session, narrow) if narrow != "float64" else None
    report = None
    if session.groups.rank == 0:
        solo = session.alone()
        with _threads(torch.get_num_threads() * session.groups.layout.world):
            reference = definition_run(solo)
            narrow_solo = layout_run(solo, narrow) if narrow_run else None
        report = _report(session, sabotage, reference, (wide_run, narrow_run, narrow_solo))
    if dist.is_initialized():
        dist.barrier()
    return report


def _checked(session: Session, name: str | None) -> Sabotage | None:
    if name is None:
        return None
    fault = find_sabotage(name)
    reason = fault.blind(session)
    if reason:
        raise ConfigError(f"this run cannot show {name!r}: {reason}")
    return fault


@contextmanager
def _threads(number: int) -> Generator[None]:
    """The other ranks wait meanwhile, so that rank 0 may compute with the threads of all."""
    own = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(own)


def _report(
    session: Session,
    sabotage: str | None,
    reference: Outcome,
    runs: tuple[Outcome, Outcome | None, Outcome | None],
) -> Report:
    wide_run, narrow_run, narrow_solo = runs
    rows = parameter_errors(wide_run.gradients, reference.gradients)
    after = parameter_errors(wide_run.parameters, reference.parameters)
    checks = [
        Check("loss, float64", relative_error(wide_run.loss, reference.loss), LOSS_BOUND),
        Check(
            "evaluation loss, float64",
            relative_error(wide_run.evaluation_loss, reference.evaluation_loss),
            LOSS_BOUND,
        ),
        Check("gradients, float64", rows[0].error, GRADIENT_BOUND),
        Check("parameters after 3 steps, float64", after[0].error, GRADIENT_BOUND),
    ]
    if narrow_run and narrow_solo:
        checks += _narrow_checks(session.config.train.dtype, reference, narrow_run, narrow_solo)
    return Report(_words(session), tuple(checks), rows, sabotage)


def _words(session: Session) -> str:
    layout, chosen = session.groups.layout, session.choice.chosen
    sizes = " × ".join(f"{name} {layout.size(name)}" for name in ("pp", "dp", "cp", "tp"))
    return (
        f"{sizes}, sp {'on' if layout.sp else 'off'}, {chosen.transport} over {chosen.sharding} shards, "
        f"{session.spec.num_layers} layers, {session.config.batch.global_batch} rows of {session.config.data.sequence}"
    )


def _narrow_checks(dtype: str, reference: Outcome, run: Outcome, solo: Outcome) -> list[Check]:
    """The layout's error in the run's dtype, against twice the error of one process in that dtype."""
    smallest = torch.finfo(getattr(torch, dtype)).eps
    pairs = {
        "loss": (relative_error(run.loss, reference.loss), relative_error(solo.loss, reference.loss)),
        "evaluation loss": (
            relative_error(run.evaluation_loss, reference.evaluation_loss),
            relative_error(solo.evaluation_loss, reference.evaluation_loss),
        ),
        "gradients": (
            parameter_errors(run.gradients, reference.gradients)[0].error,
            parameter_errors(solo.gradients, reference.gradients)[0].error,
        ),
    }
    return [
        Check(f"{name}, {dtype}", error, NARROW_FACTOR * max(alone, smallest))
        for name, (error, alone) in pairs.items()
    ]
