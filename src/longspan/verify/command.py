"""`verify`: one run, two ways, compared in float64 and in the run's own dtype."""

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import torch

from longspan.errors import ConfigError
from longspan.train.session import DTYPES, Session
from longspan.verify.compare import Check, Outcome, Report, parameter_errors, relative_error
from longspan.verify.runs import definition_run, layout_run
from longspan.verify.sabotage import find_sabotage

__all__ = ["verify"]

GRADIENT_BOUND = 1e-10
LOSS_BOUND = 1e-12
# In a narrower dtype the layout may err this many times as much as one process does,
NARROW_FACTOR = 2.0
# and one process, on the same kernels and sums as the layout, as much as plain dense attention and full logits do.
ONE_PROCESS_FACTOR = 4.0


def verify(session: Session, sabotage: str | None = None) -> Report | None:
    """Compare the session's layout with one process on its own model and first batches.

    Compared in float64: loss, evaluation loss, every parameter's gradient, and all parameters after three optimizer
    steps, against a dense-mask reference. In the run's dtype, the layout's error against that reference is held to
    twice one process's error in that dtype. A few short runs; the reference holds the whole model on rank 0.

    With a sabotage only float64 is compared, after the untouched run has passed on the same batches.

    Args:
        session: every rank of the layout calls with its own.
        sabotage: name of a fault to put into the layout's path, which then must be caught.

    Returns:
        The report on rank 0, None elsewhere; the other ranks do not wait for it.

    Raises:
        ConfigError: an unknown sabotage; one that this run cannot show, with the reason; or an untouched run that
            differs already.
    """
    if sabotage is not None:
        return _verify_sabotaged(session, sabotage)
    narrow = session.config.train.dtype
    wide_run = layout_run(session, "float64")
    narrow_run = layout_run(session, narrow) if narrow != "float64" else None
    if session.groups.rank != 0:
        return None
    with _all_threads(session):
        reference = definition_run(session.alone())
        report = _report(session, wide_run, reference, None)
        if narrow_run is None:
            return report
        solo, plain = layout_run(session.alone(), narrow), definition_run(session.alone(), narrow)
    checks = _narrow_checks(session, (reference, narrow_run, solo, plain))
    return replace(report, checks=report.checks + checks)


def _verify_sabotaged(session: Session, name: str) -> Report | None:
    fault = find_sabotage(name)
    if reason := fault.blind(session):
        raise ConfigError(f"this run cannot show {name!r}: {reason}")
    untouched = layout_run(session, "float64")
    with fault.apply(session):
        broken = layout_run(session, "float64")
    if session.groups.rank != 0:
        return None
    with _all_threads(session):
        reference = definition_run(session.alone())
    if not _report(session, untouched, reference, None).passed:
        raise ConfigError(
            f"the run differs without {name!r} already; run verify without --sabotage to see where"
        )
    return _report(session, broken, reference, name)


@contextmanager
def _all_threads(session: Session) -> Generator[None]:
    """The other ranks are done, so that rank 0 may compute with the threads of all."""
    own = torch.get_num_threads()
    torch.set_num_threads(own * session.groups.layout.world)
    yield
    torch.set_num_threads(own)


def _report(session: Session, run: Outcome, reference: Outcome, sabotage: str | None) -> Report:
    """What float64 shows."""
    rows, after = (
        parameter_errors(run.gradients, reference.gradients),
        parameter_errors(run.parameters, reference.parameters),
    )
    checks = (
        Check("loss, float64", relative_error(run.loss, reference.loss), LOSS_BOUND),
        Check(
            "evaluation loss, float64",
            relative_error(run.evaluation_loss, reference.evaluation_loss),
            LOSS_BOUND,
        ),
        Check("gradients, float64", rows[0].error, GRADIENT_BOUND),
        Check("parameters after 3 steps, float64", after[0].error, GRADIENT_BOUND),
    )
    return Report(_words(session), checks, rows, sabotage)


def _words(session: Session) -> str:
    layout, stage = session.groups.layout, session.plan.stages[0]
    chosen = session.choice(stage).chosen
    sizes = " × ".join(f"{name} {layout.size(name)}" for name in ("pp", "dp", "cp", "tp"))
    return (
        f"{sizes}, sp {'on' if layout.sp else 'off'}, {chosen.transport} over {chosen.sharding} shards, "
        f"{session.spec.num_layers} layers, {stage.batch.global_batch} rows of {stage.sequence}"
    )


def _narrow_checks(session: Session, runs: tuple[Outcome, Outcome, Outcome, Outcome]) -> tuple[Check, ...]:
    """Errors in the run's dtype: the layout's against one process's, and that one's against plain dense formulas."""
    reference, *narrow = runs
    dtype = session.config.train.dtype
    eps = torch.finfo(DTYPES[dtype]).eps
    # A loss is a mean of many roundings; one process may by luck be right to the last digits.
    rounding = eps / math.sqrt(session.training_step(0).num_targets) + torch.finfo(torch.float32).eps
    checks: list[Check] = []
    for name, floor in (("loss", rounding), ("evaluation loss", rounding), ("gradients", eps)):
        layout, solo, plain = (_error(name, run, reference) for run in narrow)
        checks.append(Check(f"{name}, {dtype}", layout, NARROW_FACTOR * max(solo, floor)))
        checks.append(Check(f"{name} of one process, {dtype}", solo, ONE_PROCESS_FACTOR * max(plain, floor)))
    return tuple(checks)


def _error(name: str, run: Outcome, reference: Outcome) -> float:
    if name == "loss":
        return relative_error(run.loss, reference.loss)
    if name == "evaluation loss":
        return relative_error(run.evaluation_loss, reference.evaluation_loss)
    return parameter_errors(run.gradients, reference.gradients)[0].error
