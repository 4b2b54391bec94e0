"""How two runs of the same batch are compared, and what the comparison says."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Check", "Outcome", "ParameterError", "Report", "parameter_errors", "relative_error"]

# No tensor is held to less than this share of the largest gradient in the model.
SMALLEST_SCALE = 1e-6


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a run computed, whole and in float64.

    Attributes:
        loss: loss of the first step, in nats a token.
        gradients: its gradient by parameter name.
        evaluation_loss: loss on the held-out rows before any step.
        parameters: all parameters after the optimizer steps.
    """

    loss: float
    gradients: dict[str, Tensor]
    evaluation_loss: float
    parameters: dict[str, Tensor]


@dataclass(frozen=True)
class ParameterError:
    """How one parameter's gradient differs from the reference.

    Attributes:
        name: parameter name.
        error: largest absolute difference ÷ largest absolute reference value.
        scale: norm of the gradient ÷ norm of the reference gradient; 1 but for wrong sums and wrong divisors.
    """

    name: str
    error: float
    scale: float


@dataclass(frozen=True)
class Check:
    """One comparison against its bound."""

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the bound; an error that is not a number never is."""
        return self.error <= self.bound


@dataclass(frozen=True)
class Report:
    """Everything that a verification found.

    Attributes:
        run: what was compared, in words.
        checks: all comparisons.
        parameters: gradient errors in float64, worst first.
        sabotage: what was broken on purpose, or None.
    """

    run: str
    checks: tuple[Check, ...]
    parameters: tuple[ParameterError, ...]
    sabotage: str | None

    @property
    def passed(self) -> bool:
        """Whether every check holds."""
        return all(check.passed for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """The report as plain values; numbers that JSON lacks become null."""
        errors = {check.name: check.error for check in self.checks}
        return {
            "passed": self.passed,
            "worst_gradient_error": _finite(errors["gradients, float64"]),
            "loss_error": _finite(errors["loss, float64"]),
            "checks": [
                {"name": c.name, "error": _finite(c.error), "bound": c.bound, "passed": c.passed}
                for c in self.checks
            ],
            "parameters": [{k: _finite(v) for k, v in asdict(row).items()} for row in self.parameters],
            "sabotage": self.sabotage,
            "run": self.run,
        }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def relative_error(value: float, reference: float) -> float:
    """|value − reference| ÷ |reference|."""
    return abs(value - reference) / abs(reference)


def parameter_errors(tensors: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[ParameterError, ...]:
    """Every tensor's error and scale against the reference, worst error first.

    Raises:
        KeyError: a tensor that only one of them has.
    """
    if tensors.keys() != reference.keys():
        raise KeyError(f"only one run has {sorted(tensors.keys() ^ reference.keys())}")
    largest = max(float(tensor.abs().max()) for tensor in reference.values())
    rows = (
        _error(name, tensors[name], expected, SMALLEST_SCALE * largest)
        for name, expected in reference.items()
    )
    return tuple(sorted(rows, key=lambda row: -math.inf if math.isnan(row.error) else -row.error))


def _error(name: str, tensor: Tensor, reference: Tensor, smallest: float) -> ParameterError:
    difference = float((tensor - reference).abs().max())
    scale = (
        float(tensor.norm() / reference.norm()) if reference.any() else float(torch.equal(tensor, reference))
    )
    return ParameterError(name, difference / max(float(reference.abs().max()), smallest), scale)
