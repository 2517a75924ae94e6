"""Operations that compute: forward, loss, backward, norm, update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strategies.values import Group, Layer, Operation, Value


@dataclass(frozen=True, slots=True)
class LayerOperation(Operation):
    layer: Layer
    microbatch: int

    def named(self, what: str) -> str:
        return f"layer {self.layer.index}, microbatch {self.microbatch}, {what}"


class Forward(LayerOperation):
    """The layer's output, or this rank's columns of it."""

    __slots__ = ()

    @property
    def identity(self) -> str:
        return self.named("forward")

    @property
    def reads(self) -> tuple[Value, ...]:
        return (self.layer.input(self.microbatch), *self.layer.parameters())

    @property
    def writes(self) -> tuple[Value, ...]:
        outputs = (self.layer.own_output(self.microbatch),)
        if "preactivation" in self.layer.spec.saves:
            return (*outputs, self.layer.preactivation(self.microbatch))
        if "graph" in self.layer.spec.saves:
            return (*outputs, Value("graph", self.layer.index, self.microbatch))
        return outputs


class BackwardInput(LayerOperation):
    """dX: the layer below waits for it. The lowest layer takes only its activation's derivative."""

    __slots__ = ()

    @property
    def identity(self) -> str:
        return self.named("dX")

    @property
    def reads(self) -> tuple[Value, ...]:
        layer, m = self.layer, self.microbatch
        return (layer.own_gradient(m), *layer.saved(m), *layer.parameters())

    @property
    def writes(self) -> tuple[Value, ...]:
        layer, m = self.layer, self.microbatch
        own = (layer.own_gradient(m), layer.activation_gradient(m))  # in place
        return (*own, layer.input_gradient(m)) if layer.has_below else own


@dataclass(frozen=True, slots=True)
class BackwardWeight(LayerOperation):
    """dW: nobody waits for it but the optimizer. `accumulate` adds to what earlier microbatches left."""

    accumulate: bool = False

    @property
    def identity(self) -> str:
        return self.named("dW")

    @property
    def reads(self) -> tuple[Value, ...]:
        layer, m = self.layer, self.microbatch
        sums = layer.weight_gradients() if self.accumulate else ()
        return (layer.activation_gradient(m), layer.input(m), *sums)

    @property
    def writes(self) -> tuple[Value, ...]:
        return self.layer.weight_gradients()


@dataclass(frozen=True, slots=True)
class Backward(LayerOperation):
    """dX and dW in one pass, for layers that cannot take them apart."""

    accumulate: bool = False

    @property
    def identity(self) -> str:
        return self.named("dX and dW")

    @property
    def reads(self) -> tuple[Value, ...]:
        layer, m = self.layer, self.microbatch
        sums = layer.weight_gradients() if self.accumulate else ()
        return (layer.own_gradient(m), Value("graph", layer.index, m), *layer.parameters(), *sums)

    @property
    def writes(self) -> tuple[Value, ...]:
        below = (self.layer.input_gradient(self.microbatch),) if self.layer.has_below else ()
        return (*below, *self.layer.weight_gradients())


class LossMaximum(LayerOperation):
    """Cross-entropy on column shards: each row's largest logit held here."""

    __slots__ = ()

    @property
    def identity(self) -> str:
        return f"microbatch {self.microbatch}, class maximum"

    @property
    def reads(self) -> tuple[Value, ...]:
        return (self.layer.own_output(self.microbatch),)

    @property
    def writes(self) -> tuple[Value, ...]:
        return (Value("class maximum", self.layer.index, self.microbatch),)


class LossSums(LayerOperation):
    """Cross-entropy on column shards: each row's sum of exponentials, and its target's logit, held here."""

    __slots__ = ()

    @property
    def identity(self) -> str:
        return f"microbatch {self.microbatch}, class sums"

    @property
    def reads(self) -> tuple[Value, ...]:
        m = self.microbatch
        return (
            self.layer.own_output(m),
            Value("class maximum", self.layer.index, m),
            Value("target", self.layer.index, m),
        )

    @property
    def writes(self) -> tuple[Value, ...]:
        return (Value("class sums", self.layer.index, self.microbatch),)


@dataclass(frozen=True, slots=True)
class Loss(LayerOperation):
    """Loss and its gradient. `sharded`: the class sums were reduced before. `counts`: adds to the total."""

    sharded: bool = False
    counts: bool = True

    @property
    def identity(self) -> str:
        return f"microbatch {self.microbatch}, loss"

    @property
    def reads(self) -> tuple[Value, ...]:
        index, m = self.layer.index, self.microbatch
        own = (self.layer.own_output(m), Value("target", index, m))
        return (*own, Value("class sums", index, m)) if self.sharded else own

    @property
    def writes(self) -> tuple[Value, ...]:
        return (self.layer.own_gradient(self.microbatch),)


@dataclass(frozen=True, slots=True)
class Score(LayerOperation):
    """Evaluation: loss and number of right classes, from the whole output; no gradient."""

    counts: bool = True

    @property
    def identity(self) -> str:
        return f"microbatch {self.microbatch}, score"

    @property
    def reads(self) -> tuple[Value, ...]:
        m = self.microbatch
        return (self.layer.output(m), Value("target", self.layer.index, m))


@dataclass(frozen=True, slots=True)
class GradientNorm(Operation):
    """Global norm of all gradients, and the factor that clips them; crosses ranks on the control group."""

    layers: tuple[Layer, ...]
    group: Group
    lane: ClassVar[str] = "communication"

    @property
    def identity(self) -> str:
        return "gradient norm"

    @property
    def reads(self) -> tuple[Value, ...]:
        return tuple(value for layer in self.layers for value in layer.weight_gradients())

    @property
    def writes(self) -> tuple[Value, ...]:
        return (Value("gradient norm", -1, 0),)


@dataclass(frozen=True, slots=True)
class Update(Operation):
    """Optimizer step on these layers."""

    layers: tuple[Layer, ...]
    clips: bool = False

    @property
    def identity(self) -> str:
        if not self.layers:
            return "update of nothing"
        first, last = self.layers[0].index, self.layers[-1].index
        return f"update of layer {first}" if first == last else f"update of layers {first}-{last}"

    @property
    def reads(self) -> tuple[Value, ...]:
        norm = (Value("gradient norm", -1, 0),) if self.clips else ()
        return tuple(v for layer in self.layers for v in layer.weight_gradients()) + self.writes + norm

    @property
    def writes(self) -> tuple[Value, ...]:
        return tuple(value for layer in self.layers for value in layer.parameters())
