"""What a call of a model that is cut into stages does: a batch passes through all of them, in micro-batches.

The user's loop stays. The call runs the schedule, forwards and backwards; it returns the loss of the whole batch, the
same on all ranks, and the backward of that loss adds the gradients that are there. By torch's own schedules.
Independent of plans and loaders.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from nbdist.errors import UsageError
from nbdist.train.pipeline.stages import Stages, tied_weight
from nbdist.train.sharding.shards import gather_again
from nbdist.train.structure.shared_batch import SharedBatch

_NO_LABEL = -100
_PIPELINE = "_nbdist_pipeline"
_BY_ROW = ("input_ids", "attention_mask", "position_ids", "labels")
_KEPT = 8  # schedules, one for each shape of micro-batches


def run_through_stages(model: nn.Module, pipeline: Pipeline) -> None:
    """Have calls of a model, of which this rank has a stage, run a pipeline. Its class gets a subclass of its name."""
    setattr(model, _PIPELINE, pipeline)
    model.__class__ = _piped(type(model))  # type: ignore[arg-type]  # classes are hashable


@functools.cache
def _piped(kind: type[nn.Module]) -> type[nn.Module]:
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        pipeline: Pipeline = getattr(model, _PIPELINE)
        if pipeline.is_inside:
            return kind.__call__(model, *args, **kwargs)
        return pipeline.run(model, args, kwargs)

    @functools.wraps(kind.forward)
    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        pipeline: Pipeline = getattr(model, _PIPELINE)
        if pipeline.is_inside:
            return pipeline.compute_stage(functools.partial(kind.forward, model), model, *args, **kwargs)
        return pipeline.run(model, args, kwargs)

    members = {"__module__": kind.__module__, "__call__": call, "forward": forward}
    return type(kind.__name__, (kind,), members)


class Pipeline:
    """Runs batches through the stages of a model.

    Args:
        stages: Which of them is this rank's.
        schedule: "1f1b" or "gpipe".
        micro_batches: Into how many parts each batch is cut.
        dtype: Of hidden states on their way between stages.
        device: Where this rank computes.
        batches: Compares the first batch.
        gather: Returns what each of all ranks says.

    Attributes:
        is_inside: Whether the model is called for this rank's stage.
    """

    def __init__(
        self,
        stages: Stages,
        *,
        schedule: str,
        micro_batches: int,
        dtype: torch.dtype,
        device: torch.device,
        batches: SharedBatch,
        gather: Callable[[str], Sequence[str]],
    ) -> None:
        self.is_inside = False
        self._stages = stages
        self._schedule = schedule
        self._micro_batches = micro_batches
        self._dtype = dtype
        self._device = device
        self._batches = batches
        self._gather = gather
        self._is_checked = False
        self._schedules: dict[object, Any] = {}
        self._items: Any = None  # tokens that have a label, in the batch at hand

    def forget_batches(self) -> None:
        """Begin as if there had been no batch. To be called on all ranks, once their groups were renewed.

        In its first batch a schedule agrees with other stages on how they exchange, which some may have done already.
        """
        self._schedules.clear()

    # --- one batch

    def run(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what the model would: the loss of the batch; logits only without gradients, and then on all ranks.

        Raises:
            UsageError: The batch has what can't pass through stages; or the first one has no labels, other rows on
                ranks of one pipeline, or rows that can't be divided. Then on all ranks alike.
        """
        from transformers.modeling_outputs import CausalLMOutputWithPast

        trains = torch.is_grad_enabled()
        names = tuple(inspect.signature(type(model).forward).parameters)[1:]
        given = {name: value for name, value in (*zip(names, args, strict=False), *kwargs.items()) if value is not None}
        self._refuse_first(given, trains)
        _refuse_unknown(given, trains)
        as_tuple = given.pop("return_dict", True) is False
        labels, rows = given.get("labels"), len(given["input_ids"])
        self._items = given.pop("num_items_in_batch", None)
        if self._items is None and labels is not None:
            self._items = (labels[:, 1:] != _NO_LABEL).sum().to(self._device)
        batch = self._divisible({name: value for name, value in given.items() if name != "use_cache"})
        loss, logits = self._trained(model, batch) if trains else self._evaluated(model, batch, rows)
        return (loss, logits) if as_tuple else CausalLMOutputWithPast(loss=loss, logits=logits)

    def _trained(self, model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, None]:
        earlier = [(parameter, parameter.grad) for parameter in model.parameters()]
        for parameter, _ in earlier:
            parameter.grad = None
        try:
            loss = self._pass(model, batch, trains=True)[0]
            if self._stages.tied and tied_weight(model, self._stages).requires_grad:
                self._add_gradients_of_tied(model)
            gradients = [(parameter, parameter.grad) for parameter, _ in earlier if parameter.grad is not None]
        finally:
            for parameter, gradient in earlier:
                parameter.grad = gradient
        anchor = torch.zeros((), device=self._device, requires_grad=True)
        return _Computed.apply(loss, anchor, gradients), None  # type: ignore[no-untyped-call]

    def _evaluated(self, model: Any, batch: dict[str, Any], rows: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        try:
            loss, logits = self._pass(model, batch, trains=False)
        finally:
            gather_again(model)
        return loss, self._from_last(logits)[:rows]

    def _pass(self, model: Any, batch: dict[str, Any], *, trains: bool) -> tuple[Any, Any]:
        stages = self._stages
        words, labels = batch.pop("input_ids"), batch.pop("labels", None)
        schedule = self._schedule_for(model, words, trains, labels is not None)
        losses: list[torch.Tensor] = []
        arguments: dict[str, Any] = dict(batch)
        if stages.is_last and labels is not None:
            arguments |= {"target": labels, "losses": losses}
        if trains and "return_outputs" in inspect.signature(schedule.step).parameters:
            arguments["return_outputs"] = False
        self.is_inside = True
        try:
            run = schedule.step if trains else schedule.eval
            logits = run(*([words] if stages.is_first else []), **arguments)
        except RuntimeError as error:
            raise _of_the_model(error) from None
        finally:
            self.is_inside = False
        if labels is None:
            return None, logits
        loss = torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self._device)
        dist.broadcast(loss, stages.rank_of(stages.count - 1), group=stages.group)
        return loss, logits

    def compute_stage(self, original: Callable[..., Any], model: Any, value: torch.Tensor, **named: Any) -> Any:
        """Return what this rank's stage makes of a micro-batch: hidden states, or logits."""
        entry = "input_ids" if self._stages.is_first else "inputs_embeds"
        named = {**named, entry: value, "use_cache": False, "return_dict": True}
        if self._stages.is_last:
            return original(**named).logits
        named.pop("logits_to_keep", None)
        return model.base_model(**named).last_hidden_state

    def _add_gradients_of_tied(self, model: Any) -> None:
        """Give the first and the last stage the sum of their gradients of the weight that both have."""
        stages, weight = self._stages, tied_weight(model, self._stages)
        gradient = _local(weight.grad)
        other = stages.rank_of(stages.count - 1 if stages.is_first else 0)
        theirs = torch.empty_like(gradient)
        sent = gradient.contiguous()
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, other, group=stages.group),
                dist.P2POp(dist.irecv, theirs, other, group=stages.group),
            ]
        ):
            work.wait()
        gradient.add_(theirs)

    def _from_last(self, logits: torch.Tensor | None) -> torch.Tensor:
        """Return the last stage's logits on all ranks of a pipeline."""
        stages = self._stages
        source = stages.rank_of(stages.count - 1)
        told: list[Any] = [None if logits is None else (logits.shape, logits.dtype)]
        dist.broadcast_object_list(told, source, group=stages.group)
        shape, dtype = told[0]
        whole = torch.empty(shape, dtype=dtype, device=self._device) if logits is None else logits.contiguous()
        dist.broadcast(whole, source, group=stages.group)
        return whole

    # --- micro-batches

    def _divisible(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch on the device with rows that micro-batches divide: those that are added have no label."""
        rows = len(batch["input_ids"])
        missing = -rows % self._micro_batches
        found = {}
        for name, value in batch.items():
            if not isinstance(value, torch.Tensor) or value.ndim == 0:
                found[name] = value
                continue
            whole = value.to(self._device)
            if len(whole) != rows:  # one row for all, as positions may be
                whole = whole.expand(rows, *whole.shape[1:])
            if missing:
                more = whole[:1].expand(missing, *whole.shape[1:])
                whole = torch.cat([whole, torch.full_like(more, _NO_LABEL) if name == "labels" else more])
            found[name] = whole
        return found

    def _schedule_for(self, model: Any, words: torch.Tensor, trains: bool, has_labels: bool) -> Any:
        key = (words.shape, trains, has_labels)
        if key not in self._schedules:
            if len(self._schedules) >= _KEPT:
                del self._schedules[next(iter(self._schedules))]
            self._schedules[key] = self._made_schedule(model, words, trains, has_labels)
        return self._schedules[key]

    def _made_schedule(self, model: Any, words: torch.Tensor, trains: bool, has_labels: bool) -> Any:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        stages = self._stages
        rows, length = len(words) // self._micro_batches, words.shape[1]
        shape = (rows, length, model.config.hidden_size)
        # Shapes are known, so nothing is computed to learn them.
        hidden = torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=trains)
        first = torch.empty((rows, length), dtype=words.dtype, device="meta")
        stage = PipelineStage(
            model,
            stages.number,
            stages.count,
            self._device,
            input_args=first if stages.is_first else hidden,
            output_args=hidden,  # of the last stage it is not looked at
            group=stages.group,
        )
        kind = ScheduleGPipe if self._schedule == "gpipe" else Schedule1F1B
        loss = functools.partial(self._loss, model) if has_labels else _no_loss
        return kind(stage, self._micro_batches, loss_fn=loss, scale_grads=False)

    def _loss(self, model: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return what a micro-batch adds to the mean over all tokens of the batch that have a label."""
        loss: torch.Tensor = model.loss_function(
            logits=logits, labels=labels, vocab_size=model.config.vocab_size, num_items_in_batch=self._items
        )
        return loss

    # --- what is refused

    def _refuse_first(self, given: Mapping[str, Any], trains: bool) -> None:
        """Refuse the first batch on all ranks if it is wrong on one of them: the others would wait for that one."""
        self._batches.compare(given)
        if not trains or self._is_checked:
            return
        rows = len(given["input_ids"]) if isinstance(given.get("input_ids"), torch.Tensor) else 0
        wrong = ""
        if "labels" not in given:
            wrong = "the model was called without labels: with pp the last stage computes the loss, so pass labels"
        elif rows % self._micro_batches:
            fitting = rows // self._micro_batches * self._micro_batches or self._micro_batches
            wrong = (
                f"{rows} rows of a batch can't be cut into {self._micro_batches} micro-batches (pp_micro_batches) of "
                f"the same size: give each batch {fitting} rows, or a multiple of {self._micro_batches}"
            )
        told = next((text for text in self._gather(wrong) if text), "")
        if told:
            raise UsageError(told)
        self._is_checked = True


def _of_the_model(error: RuntimeError) -> BaseException:
    """Return what a model raised in its stage, which torch's schedules raise another error from."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    module = "" if frame is None else frame.tb_frame.f_globals.get("__name__", "")
    return error.__cause__ if module.startswith("torch.distributed.pipelining") and error.__cause__ else error


def _no_loss(logits: torch.Tensor, labels: object) -> torch.Tensor:
    return logits.sum()


def _refuse_unknown(given: Mapping[str, Any], trains: bool) -> None:
    if not isinstance(given.get("input_ids"), torch.Tensor):
        raise UsageError("pp passes words through stages, and this batch has none: give the model input_ids")
    if trains and "labels" not in given:
        raise UsageError(
            "the model was called without labels: with pp the last stage computes the loss, so pass labels"
        )
    rows = len(given["input_ids"])
    for name, value in given.items():
        if name in ("use_cache", "return_dict", "num_items_in_batch"):
            continue
        if name not in _BY_ROW:
            if value is False or (isinstance(value, int) and value == 0):
                continue
            raise UsageError(
                f"with pp a model takes {', '.join(_BY_ROW)} and num_items_in_batch: leave {name} out, or set pp to 1"
            )
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) not in (1, rows):
            raise UsageError(f"pp cuts {name} into micro-batches along its first dimension: give it {rows} rows")


class _Computed(torch.autograd.Function):
    """A loss whose gradients are there: its backward adds them, times its own gradient, to those of parameters."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, anchor: torch.Tensor, gradients: list[Any]) -> torch.Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @torch.no_grad()
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        found, ctx.gradients = ctx.gradients, None
        if found is None:
            raise UsageError("backward was called twice for one batch: with pp its gradients are there only once")
        for parameter, gradient in found:
            _local(gradient).mul_(gradients[0].to(gradient.device))
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                _local(parameter.grad).add_(_local(gradient))
        return None, None, None


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
