"""Merges two attentions over disjoint tokens into the attention over both."""

import torch
from torch import Tensor


def merge_memory(
    self_output: Tensor,
    self_lse: Tensor,
    memory_output: Tensor,
    memory_lse: Tensor,
    value_gate: float,
    layer_bias: float,
    log_remainder: Tensor | float | None,
) -> Tensor:
    """Compute the attention output over [memory ; self] from its two parts.

    Args:
        self_output: [R, H, D], any float type.
        self_lse: [R, H] float32.
        memory_output: [R, H, D], any float type, before the value gate.
        memory_lse: [R, H] float32, before the layer bias.
        value_gate: scale of the memory values.
        layer_bias: added to every memory logit, including the remainder's.
        log_remainder: logit of one more memory token with value 0, [R] or a number; None if there is none.

    Returns:
        [R, H, D] float32.
    """
    retrieved: Tensor | float = value_gate
    if log_remainder is not None:
        remainder = torch.as_tensor(log_remainder, dtype=torch.float32, device=memory_lse.device)
        whole = torch.logaddexp(memory_lse, remainder.view(-1, 1))  # [R, H]
        retrieved = value_gate * (memory_lse - whole).exp_().unsqueeze(-1)
        memory_lse = whole
    mass = torch.sigmoid(memory_lse + layer_bias - self_lse).unsqueeze(-1)  # [R, H, 1]
    return torch.lerp(self_output.float(), memory_output.float() * retrieved, mass)
