"""Dense float64 attention from document numbers and positions; shares no code with masks, shardings or exchanges."""

import torch
from torch import Tensor


def dense_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    lengths: list[int],
    causal: bool,
    window: int | None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Explicit softmax over all T × T scores, one query head at a time; a sink is one more key that has no value."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.cat([torch.arange(n) for n in lengths])
    distance = position[:, None] - position[None, :]
    seen = document[:, None] == document[None, :]
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= distance < window
    outputs = []
    group = q_THD.shape[1] // k_TKD.shape[1]
    for head in range(q_THD.shape[1]):
        k, v = k_TKD[:, head // group], v_TKD[:, head // group]
        scores = q_THD[:, head] @ k.T / q_THD.shape[-1] ** 0.5
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks_H is not None:
            scores = torch.cat([scores, sinks_H[head].expand(len(scores), 1)], 1)
        outputs.append(scores.softmax(-1)[:, : len(v)] @ v)
    return torch.stack(outputs, 1)
