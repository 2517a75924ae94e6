"""Layers and models by themselves: shapes, initial weights, and gradients against plain autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collectives.group import World
from models.autograd import AutogradBlock, AutogradModel
from models.block import Block, Context, JointBlock, Model, Saved, even_parts
from models.mlp import ACTIVATIONS, DeepMLP, uniform_slice
from strategies.registry import make_strategy
from strategies.strategy import Options
from tests.truth import Case, train, worst_difference

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "tanh": torch.tanh,
    "identity": lambda z: z,
}


# Cutting and initial weights


@pytest.mark.parametrize(
    ("total", "parts", "expected"),
    [
        (10, 4, [(0, 3), (3, 6), (6, 8), (8, 10)]),
        (8, 2, [(0, 4), (4, 8)]),
        (2, 3, [(0, 1), (1, 2), (2, 2)]),
        (0, 2, [(0, 0), (0, 0)]),
        (5, 1, [(0, 5)]),
    ],
)
def test_even_parts_put_the_larger_first(total: int, parts: int, expected: list[tuple[int, int]]) -> None:
    assert list(even_parts(total, parts)) == expected


def test_any_part_of_a_stream_is_drawn_without_the_part_before() -> None:
    whole = uniform_slice(seed=3, layer=2, start=0, stop=50)
    assert whole.dtype == np.float64 and whole.shape == (50,)
    assert ((whole >= 0) & (whole < 1)).all() and len(set(whole.tolist())) == 50
    for start in range(12):
        for stop in (start, start + 1, start + 5, 50):
            assert np.array_equal(uniform_slice(3, 2, start, stop), whole[start:stop])
    assert not np.intersect1d(whole, uniform_slice(4, 2, 0, 50)).size
    assert not np.intersect1d(whole, uniform_slice(3, 1, 0, 50)).size


def initialized(
    model: Model, layer: int, columns: tuple[int, int] | None = None, seed: int = 0
) -> dict[str, Tensor]:
    views = {
        spec.name: torch.full(spec.shard(columns), float("nan"), dtype=torch.float64)
        for spec in model.layers[layer].parameters
    }
    model.initialize(layer, views, columns, seed)
    return views


def test_shards_of_initial_weights_are_slices_of_the_whole_bit_by_bit() -> None:
    model = DeepMLP(7, 10, 2, 10)
    for layer in range(2):
        whole = initialized(model, layer)
        for ranks in (2, 3, 4, 13):
            for columns in even_parts(10, ranks):
                part = initialized(model, layer, columns)
                assert torch.equal(part["weight"], whole["weight"][slice(*columns)])
                assert part["bias"].tolist() == [0.0] * (columns[1] - columns[0])


def test_initial_weights_follow_from_seed_and_layer_alone() -> None:
    deep, shallow = DeepMLP(6, 6, 5, 6, activation="tanh"), DeepMLP(6, 6, 2, 6, activation="tanh")
    for layer in (0, 1):
        assert torch.equal(initialized(deep, layer)["weight"], initialized(shallow, layer)["weight"])
    assert not torch.equal(initialized(deep, 0)["weight"], initialized(deep, 1)["weight"])
    assert not torch.equal(initialized(deep, 0)["weight"], initialized(deep, 0, seed=1)["weight"])


@pytest.mark.parametrize(("activation", "gain_squared"), [("relu", 2), ("gelu", 2), ("tanh", 1)])
def test_initial_weights_have_hes_variance(activation: str, gain_squared: int) -> None:
    """Of 200,000 uniform weights the variance is right to about 0.2 %, the mean to 0.2 % of a deviation."""
    model = DeepMLP(200, 10, widths=[1000], activation=activation)
    hidden, last = initialized(model, 0)["weight"], initialized(model, 1)["weight"]
    assert float(hidden.var()) == pytest.approx(gain_squared / 200, rel=0.01)
    assert abs(float(hidden.mean())) < 0.01 * math.sqrt(gain_squared / 200)
    assert float(hidden.abs().max()) <= math.sqrt(3 * gain_squared / 200)
    assert float(last.var()) == pytest.approx(1 / 1000, rel=0.05)  # the last layer has no activation


def test_a_module_draws_its_own_initial_values_from_seed_and_layer() -> None:
    model = AutogradModel([lambda: nn.Linear(4, 4)] * 2, (4,))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = initialized(model, 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(initialized(model, 0)["weight"], first["weight"])
    assert not torch.equal(initialized(model, 1)["weight"], first["weight"])
    assert not torch.equal(initialized(model, 0, seed=1)["weight"], first["weight"])


# The deep MLP


def test_widths_come_from_layers_and_hidden_dim_or_from_a_list() -> None:
    def shapes(model: Model) -> list[tuple[int, ...]]:
        return [spec.shape for layer in model.layers for spec in layer.parameters]

    assert shapes(DeepMLP(6, 3, 3, 5)) == [(5, 6), (5,), (5, 5), (5,), (3, 5), (3,)]
    assert shapes(DeepMLP(6, 3, widths=[4, 2], bias=False)) == [(4, 6), (2, 4), (3, 2)]
    assert shapes(DeepMLP(6, 3, widths=[])) == [(3, 6), (3,)]
    assert shapes(DeepMLP(6, 3, 1, 5)) == [(3, 6), (3,)]
    assert DeepMLP(6, 3, 3, 5, activation="tanh").activations == ("tanh", "tanh", "identity")


def test_flops_of_a_step() -> None:
    """Products of 6 x 5 and 5 x 3: forward and dW of both, dX of the second; a multiply-add counts two."""
    assert DeepMLP(6, 3, 2, 5).step_flops(rows=10) == 10 * 2 * (2 * (30 + 15) + 15)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_layers": 0}, "model.num_layers=0 must be at least 1"),
        (
            {"activation": "swish"},
            "model.activation=swish is unknown; valid are relu, gelu, tanh, identity",
        ),
        ({"widths": [4, 0]}, "model widths [6, 4, 0, 3] must all be at least 1"),
        ({"hidden_dim": -1}, "model widths [6, -1, -1, -1, 3] must all be at least 1"),
    ],
)
def test_wrong_sizes_are_refused(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError) as refusal:
        DeepMLP(6, 3, **arguments)  # type: ignore[arg-type]
    assert str(refusal.value) == sentence


class Layer:
    """A block of a model's layer with buffers of its own, in float64; row-major whatever the block stores."""

    def __init__(
        self, model: Model, layer: int = 0, columns: tuple[int, int] | None = None, rows: int = 5
    ) -> None:
        self.model, self.spec, self.rows = model, model.layers[layer], rows
        self.parameters = initialized(model, layer, columns, seed=7)
        for name in self.parameters.keys() & {"bias"}:
            self.parameters[name].normal_(generator=torch.Generator().manual_seed(1))
        self.gradients = {name: torch.full_like(p, 7.0) for name, p in self.parameters.items()}
        self.block: Block = model.block(layer, self.parameters, self.gradients)
        self.width = self.spec.output_shape if columns is None else (columns[1] - columns[0],)

    def buffer(self, width: tuple[int, ...], value: float = 0.0) -> Tensor:
        return torch.full(self.model.activation_shape(width, self.rows), value, dtype=torch.float64)

    def stored(self, rows: Tensor) -> Tensor:
        return rows.t().contiguous() if self.model.row_axis == 1 else rows.clone()

    def as_rows(self, stored: Tensor) -> Tensor:
        return stored.t() if self.model.row_axis == 1 else stored

    def forward(self, inputs: Tensor, training: bool = True) -> Saved:
        keeps = self.buffer(self.width, math.nan) if "preactivation" in self.spec.saves else None
        saved = Saved(self.stored(inputs), self.buffer(self.width, math.nan), keeps)
        self.block.forward(saved, Context(training, 0, 0, (0, self.rows), 0))
        return saved

    def backward(
        self, saved: Saved, gradient: Tensor, accumulate: bool = False, below: bool = True
    ) -> Tensor:
        """Input gradient, by rows."""
        own = self.stored(gradient)
        result = self.buffer(self.spec.input_shape, math.nan)
        target = result if below else None
        if isinstance(self.block, JointBlock):
            self.block.backward(saved, own, target, accumulate)
        else:
            self.block.backward_input(saved, own, target)
            self.block.backward_weight(saved, own, accumulate)
        return self.as_rows(result)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def linear_by_autograd(
    layer: Layer, activation: str, inputs: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, input gradient and parameter gradients of activation(x W^T + b)."""
    leaf = inputs.clone().requires_grad_()
    leaves = {name: p.clone().requires_grad_() for name, p in layer.parameters.items()}
    output = FUNCTIONS[activation](nn.functional.linear(leaf, leaves["weight"], leaves.get("bias")))
    wanted = [leaf, *leaves.values()]
    below, *own = torch.autograd.grad(output, wanted, gradient)
    return output.detach(), below, dict(zip(leaves, own, strict=True))


def assert_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("columns", [None, (0, 6), (2, 5), (3, 3)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_linear_layer_is_autograds(
    activation: str, bias: bool, columns: tuple[int, int] | None, rows: int
) -> None:
    model = DeepMLP(4, 3, widths=[6], activation=activation, bias=bias)
    layer = Layer(model, 0, columns, rows)
    inputs, gradient = normal(rows, 4), normal(rows, *layer.width, seed=1)
    output, below, own = linear_by_autograd(layer, activation, inputs, gradient)

    saved = layer.forward(inputs)
    torch.testing.assert_close(layer.as_rows(saved.output), output, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(layer.backward(saved, gradient), below, rtol=1e-12, atol=1e-14)
    assert_close(layer.gradients, own)

    # A second microbatch adds to the first.
    more, gradient = normal(rows, 4, seed=2), normal(rows, *layer.width, seed=3)
    _, _, second = linear_by_autograd(layer, activation, more, gradient)
    layer.backward(layer.forward(more), gradient, accumulate=True)
    assert_close(layer.gradients, {name: own[name] + second[name] for name in own})


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_lowest_layer_needs_no_input_gradient(activation: str) -> None:
    layer = Layer(DeepMLP(4, 3, widths=[6], activation=activation))
    inputs, gradient = normal(5, 4), normal(5, 6, seed=1)
    _, _, own = linear_by_autograd(layer, activation, inputs, gradient)
    layer.backward(layer.forward(inputs), gradient, below=False)
    assert_close(layer.gradients, own)


def test_partial_input_gradients_of_column_shards_add_up() -> None:
    model = DeepMLP(4, 3, widths=[7], activation="tanh")
    inputs, gradient = normal(5, 4), normal(5, 7, seed=1)
    whole = Layer(model)
    expected = whole.backward(whole.forward(inputs), gradient)
    total = torch.zeros(5, 4, dtype=torch.float64)
    for start, stop in even_parts(7, 3):
        shard = Layer(model, columns=(start, stop))
        if "bias" in shard.parameters:
            shard.parameters["bias"].copy_(whole.parameters["bias"][start:stop])
        total += shard.backward(shard.forward(inputs), gradient[:, start:stop])
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-14)


# Any module


class Scaled(nn.Module):
    """A residual block with a buffer, two parameters and one that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4, bias=False))
        self.gain = nn.Parameter(torch.full((4,), 0.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * (self.inner(x) + self.shift)


class NoParameters(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x).flatten(1)


def by_autograd(
    layer: Layer, module: nn.Module, inputs: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    module.to(torch.float64)
    module.load_state_dict(dict(layer.parameters), strict=False)
    leaf = inputs.clone().requires_grad_()
    output = module(leaf.clone())  # a module may work in place
    output.backward(gradient)
    assert leaf.grad is not None
    own = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in module.named_parameters()
    }
    return output.detach(), leaf.grad, own


@pytest.mark.parametrize(
    ("factory", "input_shape"),
    [
        (Scaled, (4,)),
        (lambda: nn.Linear(4, 3), (4,)),
        (lambda: nn.Conv2d(2, 3, 3), (2, 5, 5)),
        (lambda: nn.LayerNorm(4), (4,)),
        (NoParameters, (2, 3)),
        (nn.Identity, (4,)),
        (lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3)), (4,)),
    ],
    ids=["residual", "linear", "convolution", "norm", "no parameters", "identity", "in place"],
)
def test_any_module_is_autograds(factory: Callable[[], nn.Module], input_shape: tuple[int, ...]) -> None:
    layer = Layer(AutogradModel([factory], input_shape))
    assert isinstance(layer.block, AutogradBlock)
    width = layer.spec.output_shape
    inputs, gradient = normal(5, *input_shape), normal(5, *width, seed=1)
    output, below, own = by_autograd(layer, factory(), inputs, gradient)
    saved = layer.forward(inputs)
    torch.testing.assert_close(saved.output, output)
    torch.testing.assert_close(layer.backward(saved, gradient), below)
    assert_close(layer.gradients, own)

    more, gradient = normal(5, *input_shape, seed=2), normal(5, *width, seed=3)
    _, _, second = by_autograd(layer, factory(), more, gradient)
    layer.backward(layer.forward(more), gradient, accumulate=True)
    assert_close(layer.gradients, {name: own[name] + second[name] for name in own})


def test_a_module_without_rows_leaves_zero_gradients() -> None:
    layer = Layer(AutogradModel([Scaled], (4,)), rows=0)
    layer.backward(layer.forward(normal(0, 4)), normal(0, 4))
    assert all(bool((gradient == 0).all()) for gradient in layer.gradients.values())
    layer.gradients["gain"].fill_(2.0)
    layer.backward(layer.forward(normal(0, 4)), normal(0, 4), accumulate=True)
    assert layer.gradients["gain"].tolist() == [2.0] * 4


def test_evaluating_a_module_keeps_no_graph_and_is_in_eval_mode() -> None:
    layer = Layer(AutogradModel([lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9))], (4,)))
    saved = layer.forward(normal(5, 4), training=False)
    assert saved.graph is None
    weight, bias = layer.parameters.values()
    torch.testing.assert_close(saved.output, normal(5, 4) @ weight.t() + bias)


def test_dropout_draws_the_same_in_every_run_and_anew_in_every_step() -> None:
    layer = Layer(AutogradModel([lambda: nn.Dropout(0.5)], (40,)))
    inputs = torch.ones(5, 40, dtype=torch.float64)
    outputs: list[Tensor] = []
    for step in (0, 0, 1):
        saved = Saved(inputs, torch.empty_like(inputs))
        torch.manual_seed(len(outputs))
        layer.block.forward(saved, Context(True, step, 0, (0, 5), 0))
        outputs.append(saved.output)
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu"])
def test_a_chain_of_modules_trains_like_plain_autograd(activation: str, microbatches: int) -> None:
    """In the executor inputs lie in an arena whose slots are reused: autograd must still find its own."""
    case = Case(
        modules=True,
        activation=activation,
        options=Options(microbatches=microbatches),
        batches=(12, 7, 2) * 2,
        num_layers=3,
    )
    world = World(0, 1, "gloo", 10.0)
    assert worst_difference(case, [train(world, case)]) < 1e-10


# What a module cannot do


def refusal_of(*factories: Callable[[], nn.Module], input_shape: tuple[int, ...] = (4,)) -> str:
    with pytest.raises(ValueError) as refusal:
        AutogradModel(factories, input_shape)
    sentence = str(refusal.value)
    assert "\n" not in sentence
    return sentence


def test_no_layers_are_refused() -> None:
    assert refusal_of() == "a model needs at least one layer, 0 given"


def test_a_module_that_does_not_fit_the_layer_below_is_refused_in_one_sentence() -> None:
    sentence = refusal_of(lambda: nn.Linear(4, 6), lambda: nn.Linear(5, 2))
    assert sentence.startswith("layer 1 (Linear) cannot take rows of shape (6,): ")


def test_a_module_without_a_row_per_row_is_refused() -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    for module in (Mean, Pair):
        sentence = refusal_of(module)
        assert sentence == (
            f"layer 0 ({module.__name__}) must return one tensor with a row per row of its input"
        )


def test_weights_tied_across_layers_are_refused_by_name() -> None:
    shared = nn.Parameter(torch.zeros(4, 4))

    def tied() -> nn.Module:
        module = nn.Linear(4, 4)
        module.weight = shared
        return module

    assert refusal_of(tied, lambda: nn.Linear(4, 4), tied) == (
        "parameter weight of layer 2 is tied to layer 0; tied weights across layers are not supported, "
        "give each layer its own"
    )


def test_modules_that_were_made_before_are_refused() -> None:
    lin = nn.Linear(4, 4)
    assert refusal_of(lambda: lin) == (
        "layer 0 (Linear) has parameters that were there before its factory was called; "
        "make the module in the factory"
    )
    assert refusal_of(lambda: lin, lambda: lin).startswith("parameter weight of layer 1 is tied to layer 0; ")
    assert refusal_of(lambda: 3) == (  # type: ignore[arg-type, return-value]
        "the factory of layer 0 returned int and must return a module"
    )


class RandomProjection(nn.Module):
    """A buffer that is drawn, and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


def test_buffers_follow_from_seed_and_layer_and_stand_where_the_input_does() -> None:
    """As parameters do. The layer is in float64, and has no parameter that says so."""
    inputs = torch.randn(5, 4, dtype=torch.float64)
    results = []
    for layer in (0, 0, 1):
        torch.manual_seed(len(results))  # what the process has drawn so far does not matter
        own = Layer(AutogradModel([RandomProjection] * 2, (4,)), layer)
        results.append(own.forward(inputs).output)
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


class TiedInside(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def test_a_weight_tied_within_a_layer_stays_one() -> None:
    """Or is refused: but it must not become two."""
    try:
        layer = Layer(AutogradModel([TiedInside], (4,)))
    except ValueError as refusal:
        assert "tied" in str(refusal)
        return
    assert list(layer.parameters) == ["up.weight"]
    weight = layer.parameters["up.weight"]
    inputs = normal(5, 4)
    saved = layer.forward(inputs)
    torch.testing.assert_close(saved.output, torch.tanh(inputs @ weight.t()) @ weight.t())


def test_a_frozen_parameter_stays_as_it_is() -> None:
    """Or is refused: but it must not be trained."""

    def frozen() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        module[0].requires_grad_(False)
        return module

    try:
        layer = Layer(AutogradModel([frozen], (4,)))
    except ValueError as refusal:
        assert "requires_grad" in str(refusal)
        return
    layer.backward(layer.forward(normal(5, 4)), normal(5, 4, seed=1))
    assert "0.weight" not in layer.gradients or not bool(layer.gradients["0.weight"].any())


def test_batch_norm_and_dropout_need_the_whole_batch() -> None:
    norm = AutogradModel([lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))], (4,))
    drop = AutogradModel([lambda: nn.Linear(4, 4), lambda: nn.Dropout(0.1)], (4,))
    off = AutogradModel([lambda: nn.Dropout(0.0)], (4,))
    make_strategy("single", Options()).check(norm, 1, 8)
    make_strategy("ddp", Options()).check(norm, 1, 8)
    make_strategy("pipeline", Options(schedule="naive", microbatches=4)).check(drop, 2, 8)
    make_strategy("pipeline", Options()).check(drop, 2, 8)
    make_strategy("ddp", Options(microbatches=2)).check(off, 2, 8)

    def refused(name: str, options: Options, model: Model, ranks: int) -> str:
        with pytest.raises(ValueError) as refusal:
            make_strategy(name, options).check(model, ranks, 8)
        return str(refusal.value)

    assert refused("single", Options(microbatches=2), norm, 1) == (
        "strategy.microbatches=2 cuts the batch, but layer 0 (Sequential) cannot take a part: "
        "BatchNorm1d takes statistics over the batch; "
        "use one microbatch and a split that keeps the batch whole"
    )
    assert refused("ddp", Options(), drop, 2) == (
        "strategy=ddp with world_size=2 cuts the batch, but layer 1 (Dropout) cannot take a part: "
        "Dropout draws random numbers for a whole batch at once; "
        "use one microbatch and a split that keeps the batch whole"
    )
    assert "layer 1 (Dropout)" in refused("pipeline", Options(microbatches=4), drop, 2)


def test_batch_norm_counts_as_plain_autograd_does() -> None:
    """Its running statistics, which are buffers, follow training and serve evaluation."""
    layer, module = Layer(AutogradModel([lambda: nn.BatchNorm1d(4)], (4,))), nn.BatchNorm1d(4).double()
    module.load_state_dict(layer.parameters, strict=False)
    inputs = normal(5, 4)
    torch.testing.assert_close(layer.forward(inputs).output, module(inputs))
    module.eval()
    torch.testing.assert_close(layer.forward(inputs, training=False).output, module(inputs))


def test_a_modules_backward_cannot_be_taken_apart() -> None:
    layer = Layer(AutogradModel([Scaled], (4,)))
    saved = layer.forward(normal(5, 4))
    for call in (layer.block.backward_input, layer.block.backward_weight):
        with pytest.raises(TypeError, match="cannot be split"):
            call(saved, normal(5, 4), False)  # type: ignore[arg-type]
