"""The deep MLP: y = activation(W x + b) layer by layer, by hand, without autograd on the hot path.

Activations are [features, rows], weights [out, in]. The three products of a layer are
    forward          y  = W x                [out, rows]
    input gradient   dx = W^T dz             [in, rows]
    weight gradient  dW = dz x^T             [out, in]
with dz = dy * activation'(z), taken in place of dy. Each writes straight into its buffer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from models.block import Block, Context, LayerSpec, Model, ParameterSpec, Saved

ACTIVATIONS = ("relu", "gelu", "tanh", "identity")
CACHE_PAGE_BYTES = 4096
PART_ROWS = 32
DRAWS_PER_COUNTER = 4  # numpy's Philox gives four 64-bit draws for each counter value


class LinearBlock(Block):
    """One linear layer and its activation, whole or a shard of its columns (rows of `weight`)."""

    def __init__(
        self, activation: str, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> None:
        self.activation = activation
        self.weight = parameters["weight"]
        self.weight_parts = _product_parts(self.weight)
        self.weight_gradient = gradients["weight"]
        self.bias_column = parameters["bias"].unsqueeze(1) if "bias" in parameters else None
        self.bias_gradient = gradients.get("bias")
        self._ones: dict[int, Tensor] = {}

    def forward(self, saved: Saved, context: Context) -> None:
        z = saved.output if saved.preactivation is None else saved.preactivation
        if self.bias_column is None:
            torch.mm(self.weight, saved.input, out=z)
        else:
            torch.addmm(self.bias_column, self.weight, saved.input, out=z)
        if self.activation == "relu":
            torch.relu_(z)
        elif self.activation == "tanh":
            torch.tanh_(z)
        elif self.activation == "gelu":
            torch.ops.aten.gelu.out(z, out=saved.output)

    def backward_input(self, saved: Saved, gradient: Tensor, input_gradient: Tensor | None) -> None:
        if self.activation == "relu":
            torch.ops.aten.threshold_backward.grad_input(gradient, saved.output, 0, grad_input=gradient)
        elif self.activation == "tanh":
            torch.ops.aten.tanh_backward.grad_input(gradient, saved.output, grad_input=gradient)
        elif self.activation == "gelu":
            torch.ops.aten.gelu_backward.grad_input(gradient, saved.preactivation, grad_input=gradient)
        if input_gradient is not None:
            self._multiply_transposed(gradient, input_gradient)

    def backward_weight(self, saved: Saved, gradient: Tensor, accumulate: bool) -> None:
        rows = saved.input.t()
        if accumulate:
            self.weight_gradient.addmm_(gradient, rows)
        else:
            torch.mm(gradient, rows, out=self.weight_gradient)
        if self.bias_gradient is not None:
            # A product with ones sums over rows without the temporary that `+= sum()` would make.
            ones = self._ones_like(gradient)
            if accumulate:
                self.bias_gradient.addmv_(gradient, ones)
            else:
                torch.mv(gradient, ones, out=self.bias_gradient)

    def _multiply_transposed(self, gradient: Tensor, input_gradient: Tensor) -> None:
        """input_gradient = weight^T gradient, as a sum over the parts of the weight."""
        if len(self.weight_parts) == 1:
            torch.mm(self.weight_parts[0].t(), gradient, out=input_gradient)
            return
        pieces = zip(self.weight_parts, gradient.split(PART_ROWS), strict=True)
        for place, (part, piece) in enumerate(pieces):
            if place == 0:
                torch.mm(part.t(), piece, out=input_gradient)
            else:
                input_gradient.addmm_(part.t(), piece)

    def _ones_like(self, gradient: Tensor) -> Tensor:
        rows = gradient.shape[1]
        if rows not in self._ones:
            self._ones[rows] = torch.ones(rows, dtype=gradient.dtype, device=gradient.device)
        return self._ones[rows]


class DeepMLP(Model):
    """`num_layers` linear layers of width `hidden_dim`, or of the given `widths`; the last has no activation.

    Args:
        input_dim, output_dim: widths of the data.
        widths: output width of every layer but the last; replaces num_layers and hidden_dim.
        activation: relu, gelu, tanh or identity.

    Raises:
        ValueError: a size below one or an unknown activation, named by its config key.
    """

    row_axis = 1

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        num_layers: int = 4,
        hidden_dim: int = 64,
        widths: Sequence[int] | None = None,
        activation: str = "relu",
        bias: bool = True,
    ) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"model.activation={activation} is unknown; valid are {', '.join(ACTIVATIONS)}")
        if widths is None and num_layers < 1:
            raise ValueError(f"model.num_layers={num_layers} must be at least 1")
        hidden = list(widths) if widths is not None else [hidden_dim] * (num_layers - 1)
        edges = [input_dim, *hidden, output_dim]
        if min(edges) < 1:
            raise ValueError(f"model widths {edges} must all be at least 1")
        last = len(edges) - 2
        self.activations = tuple("identity" if i == last else activation for i in range(last + 1))
        self.layers = tuple(
            _linear_spec(i, edges[i], edges[i + 1], self.activations[i], bias) for i in range(last + 1)
        )

    def initialize(
        self, layer: int, parameters: Mapping[str, Tensor], columns: tuple[int, int] | None, seed: int
    ) -> None:
        """Uniform weights of variance gain^2 / in (He et al. 2015, eq. 10; gain 1 if not relu); biases 0."""
        spec = self.layers[layer]
        inputs, outputs = spec.input_shape[0], spec.output_shape[0]
        start, stop = columns if columns is not None else (0, outputs)
        gain_squared = 2.0 if self.activations[layer] in ("relu", "gelu") else 1.0
        bound = math.sqrt(3.0 * gain_squared / inputs)
        draws = uniform_slice(seed, layer, start * inputs, stop * inputs)
        draws *= 2.0 * bound
        draws -= bound
        parameters["weight"].copy_(torch.from_numpy(draws).view(stop - start, inputs))
        if "bias" in parameters:
            parameters["bias"].zero_()

    def block(self, layer: int, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Block:
        return LinearBlock(self.activations[layer], parameters, gradients)


def _product_parts(weight: Tensor) -> tuple[Tensor, ...]:
    """Blocks of rows that a product with the transposed weight takes one after the other.

    On a CPU, rows a multiple of 4 KiB apart fall into the same few cache sets, and reading a column runs
    at two thirds of the speed: 3.6 ms against 2.4 ms for [1024, 1024]^T [1024, 64] on one core.
    """
    row_bytes = weight.stride(0) * weight.itemsize
    if weight.device.type != "cpu" or weight.shape[0] == 0 or row_bytes % CACHE_PAGE_BYTES:
        return (weight,)
    return tuple(weight.split(PART_ROWS))


def _linear_spec(index: int, inputs: int, outputs: int, activation: str, bias: bool) -> LayerSpec:
    parameters = [ParameterSpec("weight", (outputs, inputs), column_axis=0)]
    if bias:
        parameters.append(ParameterSpec("bias", (outputs,), column_axis=0))
    derivative = {"relu": ("output",), "tanh": ("output",), "gelu": ("preactivation",), "identity": ()}
    return LayerSpec(
        index=index,
        kind=f"linear, {activation}",
        input_shape=(inputs,),
        output_shape=(outputs,),
        parameters=tuple(parameters),
        saves=("input", *derivative[activation]),
        forward_flops=2 * inputs * outputs,
    )


def uniform_slice(seed: int, layer: int, start: int, stop: int) -> np.ndarray:
    """Draws start..stop of layer's stream of uniform [0, 1) float64, without making the ones before.

    Philox is a counter-based generator (Salmon et al. 2011), so a rank fills its shard of a
    layer without anybody holding the whole layer.
    """
    generator = np.random.Philox(key=np.array([seed, layer], dtype=np.uint64))
    generator.advance(start // DRAWS_PER_COUNTER)
    skip = start % DRAWS_PER_COUNTER
    return np.random.Generator(generator).random(skip + stop - start)[skip:]
