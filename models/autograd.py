"""Any `nn.Module` as a layer: one joint backward by autograd, gradients straight into the flat buffer.

Autograd allocates on every step and its graph's size is not known beforehand, so this is the
general face, not the fast one. Splitting the backward in two would cost a second pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from models.block import Block, Context, JointBlock, LayerSpec, Model, ParameterSpec, Saved

ModuleFactory = Callable[[], nn.Module]


class AutogradBlock(JointBlock):
    """A module whose parameters and gradients are views of the flat buffers."""

    def __init__(
        self,
        spec: LayerSpec,
        module: nn.Module,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> None:
        self.spec, self.module = spec, module
        self.is_placed = bool(parameters)  # on the device and in the dtype of the layer's tensors
        self.gradients = list(gradients.values())
        bound: dict[int, nn.Parameter] = {}  # one for all names under which a module ties a parameter
        for name, original in list(module.named_parameters(remove_duplicate=False)):
            owner_name, _, leaf = name.rpartition(".")
            if id(original) not in bound:
                bound[id(original)] = nn.Parameter(parameters[name])
                # Autograd adds to a gradient that is there, in place.
                bound[id(original)].grad = gradients[name]
            setattr(module.get_submodule(owner_name), leaf, bound[id(original)])

    def forward(self, saved: Saved, context: Context) -> None:
        self.module.train(context.training)
        if not self.is_placed:  # a layer without parameters learns from its input where it stands
            self.module.to(device=saved.output.device, dtype=saved.output.dtype)
            self.is_placed = True
        if saved.input.shape[0] == 0:
            saved.graph = None
            return
        leaf = saved.input.detach().requires_grad_(context.training)
        with torch.set_grad_enabled(context.training), self._random_numbers(context):
            # A copy of its own: slots of the arena are reused while autograd still holds what it has saved,
            # and a module may work in place.
            result = self.module(leaf.clone())
        saved.output.copy_(result.detach())
        saved.graph = (leaf, result) if context.training else None

    def backward(
        self, saved: Saved, gradient: Tensor, input_gradient: Tensor | None, accumulate: bool
    ) -> None:
        if not accumulate:
            for own in self.gradients:
                own.zero_()
        if saved.graph is None:
            return
        leaf, result = saved.graph
        saved.graph = None
        if result.requires_grad:
            torch.autograd.backward(result, gradient)
        if input_gradient is not None:
            if leaf.grad is None:
                input_gradient.zero_()
            else:
                input_gradient.copy_(leaf.grad)

    @contextlib.contextmanager
    def _random_numbers(self, context: Context) -> Iterator[None]:
        """A module that draws for a whole batch draws the same on whichever rank holds it."""
        if self.spec.per_batch is None or not context.training:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed_of(*context.key(self.spec.index, 0)))
            yield


class AutogradModel(Model):
    """A chain of modules, each made by its own factory, so that a rank builds only the layers it holds.

    Args:
        factories: one callable per layer, without arguments, returning a fresh module.
        input_shape: shape of one row.

    Raises:
        ValueError: a module that shares parameters with another layer's, or whose output has not
            the rows of its input.
    """

    row_axis = 0

    def __init__(self, factories: Sequence[ModuleFactory], input_shape: tuple[int, ...]) -> None:
        if not factories:
            raise ValueError("a model needs at least one layer, 0 given")
        self.factories = tuple(factories)
        layers: list[LayerSpec] = []
        owners: dict[int, int] = {}
        keep_alive: list[nn.Module] = []  # ids are compared below, so none may be freed before the end
        shape = tuple(input_shape)
        for index, factory in enumerate(self.factories):
            with torch.device("meta"):
                module = factory()
            if not isinstance(module, nn.Module):
                raise ValueError(
                    f"the factory of layer {index} returned {type(module).__name__} and must return a module"
                )
            keep_alive.append(module)
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    raise ValueError(
                        f"parameter {name} of layer {index} has requires_grad=False; "
                        "frozen parameters are not supported, make it a buffer"
                    )
                if owners.setdefault(id(parameter), index) != index:
                    raise ValueError(
                        f"parameter {name} of layer {index} is tied to layer {owners[id(parameter)]}; "
                        "tied weights across layers are not supported, give each layer its own"
                    )
        for index, module in enumerate(keep_alive):
            layers.append(_describe(index, module, shape))
            shape = layers[-1].output_shape
        self.layers = tuple(layers)
        self._made: dict[int, nn.Module] = {}  # by layer, until its block takes it

    def initialize(
        self, layer: int, parameters: Mapping[str, Tensor], columns: tuple[int, int] | None, seed: int
    ) -> None:
        """The module's own initial values, drawn with torch's generator seeded from (seed, layer)."""
        assert columns is None, "an arbitrary module has no column rule"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed_of(seed, layer))
            module = self.factories[layer]()
        for name, parameter in module.named_parameters():
            parameters[name].copy_(parameter.detach())
        self._made[layer] = module

    def block(self, layer: int, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Block:
        """Of the module that `initialize` made, whose buffers follow from the seed as well. Its parameters
        become the views given.
        """
        module = self._made.pop(layer, None)
        if module is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(_seed_of(layer))
                module = self.factories[layer]()
        like = next(iter(parameters.values()), None)
        if like is not None:
            module.to(device=like.device, dtype=like.dtype)
        return AutogradBlock(self.layers[layer], module, parameters, gradients)


def _seed_of(*key: int) -> int:
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)


def _describe(index: int, module: nn.Module, input_shape: tuple[int, ...]) -> LayerSpec:
    rows = 2
    # A module may hold meta parameters of its own default dtype; the probe follows them.
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    per_batch = _per_batch_reason(module)
    try:
        with torch.no_grad():
            output = module(torch.empty((rows, *input_shape), device="meta", dtype=dtype))
    except (RuntimeError, ValueError, TypeError) as error:
        if any(not parameter.is_meta for parameter in module.parameters()):
            raise ValueError(
                f"layer {index} ({type(module).__name__}) has parameters that were there before its factory "
                "was called; make the module in the factory"
            ) from error
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"layer {index} ({type(module).__name__}) cannot take rows of shape {input_shape}: {first_line}"
        ) from error
    if not isinstance(output, Tensor) or output.shape[:1] != (rows,):
        raise ValueError(
            f"layer {index} ({type(module).__name__}) must return one tensor with a row per row of its input"
        )
    parameters = tuple(ParameterSpec(name, tuple(p.shape)) for name, p in module.named_parameters())
    count = sum(int(np.prod(p.shape)) for p in parameters)
    return LayerSpec(
        index=index,
        kind=type(module).__name__,
        input_shape=input_shape,
        output_shape=tuple(output.shape[1:]),
        parameters=parameters,
        saves=("graph",),
        forward_flops=2
        * count,  # a multiply and an add per parameter and row: a lower bound for convolutions
        splits_backward=False,
        splits_columns=False,
        per_batch=per_batch,
    )


def _per_batch_reason(module: nn.Module) -> str | None:
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            return f"{type(child).__name__} takes statistics over the batch"
        if isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0:
            return f"{type(child).__name__} draws random numbers for a whole batch at once"
    return None
