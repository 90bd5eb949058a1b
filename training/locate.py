"""Where the first value that is not finite comes from (TrainerArgs.nonfinite = "locate").

The step is run again, from the same weights, random numbers and scales, with every module's inputs, outputs and
gradients looked at. The first that is not finite, in the order of execution, names the module. Modules inside others
come first; a value that is made between modules, in the code of the one around them, is named by its neighbours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary
from torchrec.sparse.jagged_tensor import JaggedTensor

from genrec.data.batch import Batch
from genrec.hstu.linear import is_fp8
from genrec.training.dense_parallel import own_part, total_norm
from genrec.training.ranks import Ranks


@dataclass(frozen=True)
class Finding:
    """The first value that is not finite on a rank.

    what: such as "the output of {}", where ``name`` is put. amax: the largest finite magnitude among the module's
    inputs; gradient_amax: among the gradients that came to its outputs, None in the forward. scaling: of a linear in
    FP8, ``Linear.scaling_report``.
    """

    what: str
    name: str
    amax: float | None = None
    gradient_amax: float | None = None
    scaling: Mapping[str, float] = field(default_factory=dict)

    def sentence(self) -> str:
        """What is said to the user."""
        figures = {"its inputs": self.amax, "the gradient that came to it": self.gradient_amax}
        parts = [f"largest finite magnitude in {of} {value:.4g}" for of, value in figures.items() if value is not None]
        if self.scaling:
            parts.append("FP8 " + ", ".join(f"{name} {value:.4g}" for name, value in self.scaling.items()))
        return self.what.format(self.name) + (f" ({'; '.join(parts)})" if parts else "")


def locate(model: nn.Module, batches: Sequence[Batch], *, loss_scale: float, ranks: Ranks) -> str:
    """Run forward and backward of a step on ``model`` (without DDP) again; returns a clause that names the origin.

    All ranks call alike, with batches on their device and gradients None, and are told the same: the finding of the
    lowest rank that has one. Leaves gradients behind.
    """
    watch = _Watch(model)
    with watch.attached():
        for batch in batches:
            loss = model(batch).loss_per_target.sum()
            watch.check_loss(loss)
            (loss * loss_scale).backward()
    own = _gradients(model, over_ranks=False)
    findings = ranks.gather(watch.found or _unsound_gradient(own, "the gradient of {}, added over micro-batches"))
    for rank, finding in enumerate(findings):
        if finding is not None:
            on_rank = f" on rank {rank}" if ranks.world_size > 1 else ""
            return f"in a replay of the step, the first value that is not finite{on_rank} is {finding.sentence()}"
    return _located_in_sum(model, ranks)


def _located_in_sum(model: nn.Module, ranks: Ranks) -> str:
    """What is left where every rank alone is finite: the sum over ranks, then the norm of all gradients."""
    own = _gradients(model, over_ranks=False)
    for gradient in own.values():
        ranks.average_gradient(gradient)
    gradients = own | _gradients(model, over_ranks=True)
    for summed in ranks.gather(_unsound_gradient(gradients, "the gradient of {}, added over ranks")):
        if summed is not None:
            return f"in a replay of the step every rank is finite alone, but not {summed.sentence()}"
    if not total_norm(list(gradients.values()), ranks.device).isfinite():
        size, largest = max(ranks.gather(_largest(gradients)))
        return (
            "in a replay of the step every gradient is finite, but not their global norm: the largest magnitude is "
            f"{size:.4g}, in the gradient of {largest}"
        )
    return "a replay of the step was finite, so it depends on more than weights, batches, random numbers and scales"


def _gradients(model: nn.Module, *, over_ranks: bool) -> dict[str, Tensor]:
    """By name: those that FSDP2 has averaged over ranks, of which each has a part; or the others, a rank's own."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: gradient for name, gradient in gradients.items() if isinstance(gradient, DTensor) == over_ranks}


def _unsound_gradient(gradients: Mapping[str, Tensor], what: str) -> Finding | None:
    for name, gradient in gradients.items():
        if not own_part(gradient).isfinite().all():
            return Finding(what, name)
    return None


def _largest(gradients: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest magnitude that this rank has, and the name of its gradient."""
    return max((_finite_amax([own_part(gradient)]) or 0.0, name) for name, gradient in gradients.items())


@dataclass(eq=False)
class _Call:
    """One call of a module: what it was given, and what came back to its outputs."""

    name: str
    module: nn.Module
    amax: float | None
    gradient_amax: float | None = None


@dataclass(eq=False)
class _Places:
    """Where a tensor that modules pass on was made and read, innermost module first."""

    outputs_of: list[_Call] = field(default_factory=list)
    inputs_of: list[_Call] = field(default_factory=list)


class _Watch:
    """Looks at everything that goes into and out of modules, forward and backward. ``found``: the first finding.

    Gradients are seen by hooks on tensors, not on modules: those of PyTorch's modules don't see into dataclasses, and
    put views between modules. A tensor that several modules read has one gradient, from all of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.found: Finding | None = None
        self._names = {module: name or "the model" for name, module in model.named_modules()}
        self._calls: dict[nn.Module, _Call] = {}
        self._handles: list[Any] = []
        self._parameters = WeakTensorKeyDictionary()  # those that have a hook
        self._places = WeakTensorKeyDictionary()

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Within it every module and parameter of the model is watched."""
        try:
            for module in self._names:
                self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
                self._handles.append(module.register_forward_hook(self._after, with_kwargs=True))
            yield
        finally:
            for handle in self._handles:
                handle.remove()

    def check_loss(self, loss: Tensor) -> None:
        """The sum of losses, which no module makes."""
        if self.found is None and not loss.isfinite():
            self.found = Finding("the sum of losses, each of them finite, of {}", "the model")

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = list(_float_tensors((args, kwargs)))
        call = self._calls[module] = _Call(self._names[module], module, _finite_amax(inputs))
        self._watch_parameters(module)
        if not _all_finite(inputs):
            self._find("an input of {}, made by the code before it", call)

    def _watch_parameters(self, module: nn.Module) -> None:
        """In its forward, when FSDP2 has put the whole parameters there, whose gradients are the rank's own."""
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in self._parameters:
                self._parameters[parameter] = None
                self._handles.append(parameter.register_hook(self._parameter_hook(module, name)))

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self._calls[module]
        outputs = list(_float_tensors(output))
        unsound = [name for name, p in module.named_parameters(recurse=False) if not own_part(p).isfinite().all()]
        if not _all_finite(outputs):
            because = f", whose {unsound[0]} is not finite either" if unsound else ""
            what = "the loss of {}" if module is self.model else "the output of {}"
            self._find(what + because, call)
        elif unsound and is_fp8(module):
            self._find(f"the {unsound[0]} of {{}}, which the cast to FP8 clamps,", call)  # so the output looks sound
        for tensor in _float_tensors((args, kwargs)):
            self._watch_gradient(tensor, lambda places: places.inputs_of.append(call))
        for tensor in outputs:
            self._watch_gradient(tensor, lambda places: places.outputs_of.append(call))

    def _watch_gradient(self, tensor: Tensor, add: Callable[[_Places], None]) -> None:
        if not tensor.requires_grad:
            return
        if tensor not in self._places:
            places = self._places[tensor] = _Places()
            tensor.register_hook(lambda gradient: self._on_gradient(gradient, places))
        add(self._places[tensor])

    def _on_gradient(self, gradient: Tensor, places: _Places) -> None:
        amax = _finite_amax([gradient])
        for call in places.outputs_of:
            call.gradient_amax = amax if call.gradient_amax is None else max(call.gradient_amax, amax or 0.0)
        if self.found is not None or gradient.isfinite().all():
            return
        # Of its readers, only those that a gradient came to can have spoilt it; so far each of those was finite.
        readers = [call for call in places.inputs_of if call.gradient_amax is not None]
        if readers:
            self._find("the gradient of the input of {}", readers[0])
        else:
            maker = (places.outputs_of or places.inputs_of)[0]
            self._find("the gradient of the output of {}, made by the code after it", maker)

    def _parameter_hook(self, module: nn.Module, name: str) -> Callable[[Tensor], None]:
        def on_gradient(gradient: Tensor) -> None:
            if self.found is None and not gradient.isfinite().all():
                call = self._calls.get(module) or _Call(self._names[module], module, None)
                self._find(f"the gradient of {name} of {{}}", call)

        return on_gradient

    def _find(self, what: str, call: _Call) -> None:
        if self.found is None:
            # Of a weight in parts it would take the other ranks, who may have found nothing.
            is_whole = is_fp8(call.module) and not isinstance(call.module.weight, DTensor)
            scaling = call.module.scaling_report() if is_fp8(call.module) and is_whole else {}
            self.found = Finding(what, call.name, call.amax, call.gradient_amax, scaling)


def _float_tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in arguments or results: also in dataclasses, jagged tensors and containers."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, JaggedTensor):
        yield from _float_tensors(value.values())
    elif isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(map(_float_tensors, value.values()))
    elif isinstance(value, (tuple, list)):
        yield from itertools.chain.from_iterable(map(_float_tensors, value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, part.name) for part in dataclasses.fields(value)]
        yield from itertools.chain.from_iterable(map(_float_tensors, parts))


def _all_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _finite_amax(tensors: Iterable[Tensor]) -> float | None:
    """The largest finite magnitude, None where there is no value at all."""
    sizes = [t.detach().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max() for t in tensors if t.numel()]
    return max(float(size) for size in sizes) if sizes else None
