"""Which way a call goes: straight to the launcher, or as a torch operator because somebody must see it.

An operator it is for tensors whose data is not their own (fake, functional, distributed tensors), while a dispatch mode is
active (selective checkpointing), and under a transform of torch.func. `autograd.py` and `explicit.py` ask. Whether
torch.compile traces a call they ask torch themselves.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from flash_hopper.launch.tensors import describe
from flash_hopper.problem.errors import UnsupportedError

# One C call each; torch has no public names for them.
dispatch_modes = torch._C._len_torch_dispatch_stack
transform = torch._C._functorch.peek_interpreter_stack


def check_tensors(given: Mapping[str, Any]) -> None:
    """Raise DTypeError, naming the argument, if one is no tensor."""
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            describe(name, tensor)


def must_be_seen(tensors: Iterable[Tensor]) -> bool:
    """True if a call with these must go through an operator."""
    return bool(dispatch_modes()) or transform() is not None or any(map(_is_wrapper, tensors))


def _is_wrapper(tensor: Tensor) -> bool:
    """True for a subclass whose data is not its own: fake, functional, distributed, quantized tensors."""
    return tensor.is_meta or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def as_plain(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Ordinary tensors in place of parameters, and of subclasses that only change what torch functions do."""
    with torch._C.DisableTorchFunctionSubclass():
        return {name: t if type(t) is Tensor else t.as_subclass(Tensor) for name, t in given.items()}


def refuse_transforms() -> None:
    """Functionalization sees an operator; the other transforms of torch.func would need rules of their own."""
    active = transform()
    if active is not None and active.key() != torch._C._functorch.TransformType.Functionalize:
        raise UnsupportedError(
            f"attention does not support torch.func transforms, got {active.key().name}: use torch.autograd for "
            "gradients and the batch dimension in place of vmap"
        )
