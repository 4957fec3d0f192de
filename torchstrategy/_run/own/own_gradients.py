"""What happens when a backward of the step begins and ends.

The gradients become those of the whole batch.

    begin    gradients that are there already are put aside, and so are the user's hooks
             on parameters
    during   large gradients are taken out of `.grad` and sent, as soon as they are
             there
    end      the others are sent in packs, the sums become `.grad`, hooks are called,
             and old gradients are added

So a gradient that was reduced once is never sent again, and after a backward the
program may do with `.grad` whatever it may do in plain PyTorch. See Note [How workers
agree without a message].
"""

from __future__ import annotations

import gc
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, final

import torch

from torchstrategy._base.context import without_autograd
from torchstrategy._base.torch_internals import (
    are_there_and_dense,
    have_gradient_hooks,
    hide_from_compiler,
    on_gradient,
    raw_grads,
    set_raw_grads,
)
from torchstrategy._group.participants import Participants
from torchstrategy._group.workers import Workers
from torchstrategy._run.own.assigned_gradients import AssignedGradients
from torchstrategy._run.own.counted_gradients import CountedGradients, Settled
from torchstrategy._run.own.gradient_parts import (
    add,
    all_laid_out,
    as_dense,
    refuse_graphs,
    with_gradients,
)
from torchstrategy._run.own.gradient_plans import (
    DENSE,
    LARGE,
    NONE,
    SEVERAL,
    SPARSE,
    GradientPlan,
    KnownPlans,
)
from torchstrategy._run.own.mark_format import Mark, Verdict
from torchstrategy._run.own.pack_memory import PackMemories, PackMemory
from torchstrategy._run.own.sent_gradients import SentGradients
from torchstrategy._run.own.trained_tensors import BufferLayout, TrainedTensors
from torchstrategy._run.own.user_hooks import UserHooks

_AS_SENT = Settled(1.0, None)


# Note [How workers agree without a message]
# All workers run the same step, so an exchange is mostly like the one that followed the
# same exchange before. Every worker sends what this *predicted* plan says, whatever it
# has: zeros where it has no gradient. A `Mark` rides along. It shows whether all
# workers are at the same backward of the same step, and whether each has what was
# predicted.
# - If so, the sums are right, and nobody has waited for anything else.
# - If all have the same, but something else, then each knows the right plan. The packs
#   are sent once more, as it says.
# - If they have different gradients, or are at different places, a message tells. It
#   names what must not differ. Otherwise the right plan has a gradient for each
#   parameter of which some worker has one.
# A plan says which tensors are packed together, and the order in which gloo adds up the
# numbers of three workers depends on it. So the sums of a wrong plan are dropped, also
# where they are right: a training that goes on from a checkpoint predicts nothing at
# first, and has to come to the same bits. Large gradients are sent each by itself under
# any plan, so their sums stay.
# Where a model is sharded and others send all its gradients, the mark is all that there
# is to send. It goes when backward begins, so that nobody waits for it at the end.
#
# Note [Lone replicas on accelerators]
# - The host waits for no number of the accelerator. The mark is in the memory of the
#   CPU, and travels by itself. The host waits for it when a backward ends, since a
#   wrong prediction has to be repaired before the step can read `.grad`. Meanwhile the
#   accelerator goes on with its queue.
# - A group that has a backend for the accelerator gets its tensors as they are; else
#   they are copied to the CPU. NCCL lets its stream wait for the one on which a tensor
#   was made or weighed, and `Work.wait` lets the current stream wait for the sum. Until
#   then `_under_way` holds the memory that is sent, so that nobody else can get it.
# - What the host would have to read is told in another way: running statistics count as
#   written, a setting is read when it was written, and values of parameters are
#   compared where their versions moved apart, without checksums.
# - Sparse gradients are an exception: how many rows they have is known only when the
#   accelerator has put those together that have the same index. Optimizers for sparse
#   gradients ask so, too. Others are states of a metric that a step updates, which
#   travel as messages.
class Mentions(Protocol):
    """What the workers compare at each exchange, beside gradients."""

    def note_compared(self) -> None:
        """Notes, for the next exchange, what has to be alike in all workers."""

    def mark(self) -> int:
        """32 bits of what need not be alike, but needs a message if it is not."""

    def settle_difference(self, name: str) -> None:
        """Tells the other workers what differs; all call it when their marks differ."""


class _SentAsPredicted(NamedTuple):
    """What a worker has sent by a predicted plan.

    It also says what the worker would have sent if all had asked one another.
    """

    kinds: bytes  # what it has as the gradient of each parameter
    buffers: BufferLayout | None  # the buffers that it has, if it has written any
    mark: Mark  # rides along
    memories: list[PackMemory]  # in which the sums will be


@final
class OwnGradients(SentGradients):
    """The gradients of one worker's only replica.

    The thread that called `run` uses it, and during backward the threads on which
    autograd calls hooks.

    Args:
        workers: The processes that train together.
    """

    def __init__(self, workers: Workers) -> None:
        super().__init__(workers)
        self._plans = KnownPlans(self.tensors, workers.can_overlap)
        self._assigned = AssignedGradients(workers)
        # Autograd has a thread for each kind of device, and a model may have parameters
        # on the CPU, too.
        self._sending = threading.Lock()

    def train(self, tensors: TrainedTensors) -> None:
        """Takes other parameters and buffers. Nothing is predicted of them."""
        self.tensors = tensors
        self._plans = KnownPlans(tensors, self._workers.can_overlap)
        self._memories = PackMemories(self._workers.count)
        self._staged = {}
        self._assigned.train(tensors)

    def begin_run(self, weights: Participants, step: str, mentions: Mentions) -> None:
        """A run begins.

        Args:
            weights: How much this replica counts.
            step: What to call the step.
            mentions: What else is compared.
        """
        self.weight = 0.0 if weights.is_understudy else weights.weights[0]
        self.sent_weight = self.weight
        self.loss_factor = 1.0
        # Running statistics are averaged by rows, also where gradients are added up.
        self._weight_of_buffers = 0.0 if weights.is_understudy else weights.fractions[0]
        self._total_weight = weights.total_weight
        self._counts = not weights.is_understudy
        self._leads = weights.lead_worker == self._workers.index
        self._step, self._num_backwards = step, 0
        # Whether the workers have told one another whether they leave, in this run.
        self.has_exchanged = False
        self._mentions = mentions
        self._assigned.begin_run()

    def end_run(self) -> None:
        """The run is over: nothing of it is kept."""
        del self._mentions

    # A backward

    def run_backward(self, backward: Callable[[], Any], makes_graph: bool) -> Any:
        """Runs a backward of the step, which makes gradients of the whole batch."""
        self._begin(makes_graph)
        try:
            result = backward()
        except BaseException as error:
            # By now, the other workers may have sent more, and could not be told.
            if self._under_way:
                self._workers.tell_failure(error)
            self._undo()
            raise
        finally:
            for handle in self._handles:
                handle.remove()
        with without_autograd():
            self._end(makes_graph)
        if makes_graph:
            refuse_graphs(self.tensors.parameters)
            self._assigned.note_all()
        return result

    def _begin(self, makes_graph: bool) -> None:
        self._num_backwards += 1
        self._name = f"the gradients of backward {self._num_backwards} of {self._step}"
        parameters = self.tensors.parameters
        self._earlier = with_gradients(parameters)
        if self._earlier:
            self.settle_assigned(self._name)
            self._earlier = with_gradients(parameters)
        for parameter, _ in self._earlier:
            parameter.grad = None
        self._hooks: list[UserHooks] = []
        if have_gradient_hooks(parameters):
            # Backward comes to the parameters of the last layer first, and so do their
            # hooks.
            self._hooks = [
                UserHooks(p) for p in reversed(parameters) if have_gradient_hooks((p,))
            ]
        # The plan by which this backward sends, which is only predicted. None: nothing
        # is, and all workers ask.
        self._plan = None if self._is_unforeseen else self._plans.predicted
        # Of large gradients, by the positions of their parameters: the sums, those that
        # wait for their turn to be sent, and in how many parts backward has added them.
        self._sums = {}
        self._waiting = {}
        self._num_parts: dict[int, int] = {}
        self._under_way = []
        self._handles: list[Any] = []
        # A gradient with a graph is not sent before backward has ended, since it must
        # not be written.
        if not makes_graph and (self._plan is None or self._plan.early):
            self._handles = self._watch_large()
        self._verdict: Verdict | None = None
        # What could be sent before backward runs.
        self._sent_at_begin: _SentAsPredicted | None = None
        if not parameters and self._plan is not None:
            # Others send all gradients, as `fully_shard` does. The mark is all that is
            # left, and it travels meanwhile. Buffers that this backward writes go with
            # the next one, or at the end of the run.
            with without_autograd():
                self._sent_at_begin = self._send_predicted(self._plan, [])

    def _watch_large(self) -> list[Any]:
        """Sets hooks by which large gradients are sent early.

        Before the first exchange, the hooks count the parts of gradients.
        """
        parameters = self.tensors.parameters
        if self._plan is None:
            watched = [
                i
                for i, p in enumerate(parameters)
                if p.requires_grad and p.nbytes >= LARGE
            ]
        else:
            watched = [i for i in self._plan.early if parameters[i].requires_grad]
        return [on_gradient(parameters[i], self._make_hook(i)) for i in watched]

    def _make_hook(self, i: int) -> Callable[[torch.Tensor], None]:
        def is_there(parameter: torch.Tensor) -> None:
            self._num_parts[i] = self._num_parts.get(i, 0) + 1
            if (
                self._plan is None
                or i in self._sums
                or i in self._waiting
                or parameter.grad is None
            ):
                return
            # It is taken out of `.grad`, so that backward does not add to what is being
            # sent.
            self._waiting[i], parameter.grad = as_dense(parameter.grad.detach()), None
            with self._sending:
                self._send_waiting(self._plan)

        hide_from_compiler(is_there)
        return is_there

    # The end of a backward

    def _end(self, makes_graph: bool) -> None:
        own = raw_grads(self.tensors.parameters)
        if makes_graph:
            own = [
                None if gradient is None else gradient.detach().clone()
                for gradient in own
            ]
        sums = self._sum_over_workers(own)
        # The sums of small gradients stand where the gradients of this worker stood,
        # which autograd has laid out.
        if makes_graph or sums is not own:
            sums = all_laid_out(sums, self.tensors.parameters)
            set_raw_grads(self.tensors.parameters, sums)
        self._add_earlier_and_call_hooks(sums)

    def _sum_over_workers(
        self, own: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Adds up the gradients of all workers.

        See Note [How workers agree without a message].

        The predicted plan is the plan that all would have agreed on, or else gradients
        are sent once more by the right one. `right` is the plan that holds in the end.
        """
        plan = self._plan
        if plan is None:
            self._compare()
            if self._counted is not None:
                self._weigh_as_asked()
            right = self._agree(
                self._kinds_of(own), self.tensors.layout_of_written(), self._name
            )
            memories = self._send_and_await(right, own)
        else:
            kinds, buffers, mark, memories = (
                self._sent_at_begin or self._send_predicted(plan, own)
            )
            self._await_sums()
            self._verdict = memories[0].read_marks(mark)
            settled = (
                _AS_SENT
                if self._counted is None
                else self._settle_counts(self._counted)
            )
            if settled is None:
                right, memories = self._send_again(own)
            else:
                right = self._plan_of_all(kinds, buffers, self._name)
                if (right.kinds, right.buffers) != (plan.kinds, plan.buffers):
                    rest = [i for i in plan.early if right.kinds[i] == SEVERAL]
                    memories = self._send_and_await(right, own, rest)
                if settled is not _AS_SENT:
                    self._weigh_sums(settled, memories)
        sparse = (
            {i: self._sparse_sum(i, own[i]) for i in right.sparse}
            if right.sparse
            else {}
        )
        if self._verdict is not None and not self._verdict.all_mention_same:
            self._mentions.settle_difference(self._name)
        if right.buffers is not None:
            self._write_buffers(memories)
        self._plans.note(right)
        return self._put_together(right, own, memories, sparse)

    def _weigh_as_asked(self) -> None:
        """Weighs by what all workers say, in place of a number that travels.

        All workers tell one another how much they count.
        """
        self._counted = None
        self.multiply_next(self._ask())
        self._compare()

    def _send_again(
        self, own: list[torch.Tensor | None]
    ) -> tuple[GradientPlan, list[PackMemory]]:
        """Sends all gradients by the weights that all workers tell."""
        self._weigh_as_asked()
        for i, gradient in self._unweighed.items():
            late = own[i]
            own[i] = gradient if late is None else gradient + late
        self._sums, self._unweighed = {}, {}
        right = self._agree(
            self._kinds_of(own), self.tensors.layout_of_written(), self._name
        )
        return right, self._send_and_await(right, own)

    def _compare(self) -> None:
        """Notes what this exchange compares."""
        self._verdict = None
        self._num_compared = self._workers.num_compared
        self._mentions.note_compared()

    def _send_predicted(
        self, plan: GradientPlan, own: list[torch.Tensor | None]
    ) -> _SentAsPredicted:
        """Sends what the predicted plan says, and a mark of what this worker has."""
        kinds, buffers = self._kinds_of(own), self.tensors.layout_of_written()
        self._compare()
        if not self._counts:  # what the other workers have is what counts
            kinds, buffers = (
                plan.kinds,
                None if plan.buffers is None else self.tensors.layout(),
            )
        return self._send_with_mark(plan, own, kinds, buffers)

    def _send_with_mark(
        self,
        plan: GradientPlan,
        own: list[torch.Tensor | None],
        kinds: bytes,
        buffers: BufferLayout | None,
    ) -> _SentAsPredicted:
        mark = self._mark(kinds, buffers, self._name)
        memories = self._send(plan, own, mark)
        if self._counted is not None:
            self._send_total(self._counted)
        return _SentAsPredicted(kinds, buffers, mark, memories)

    def _put_together(
        self,
        plan: GradientPlan,
        own: list[torch.Tensor | None],
        memories: Sequence[PackMemory],
        sparse: dict[int, torch.Tensor],
    ) -> list[torch.Tensor | None]:
        """The sum of each parameter's gradients, by where it has come."""
        sums: list[torch.Tensor | None] = [None] * len(own)
        for memory in memories:
            of_pack: list[Any] = memory.sums_of_gradients(
                self._of_pack(own, memory), self._are_dense
            )
            if len(of_pack) == len(own):  # as for a small model
                return of_pack
            for i, total in zip(memory.pack.gradients, of_pack, strict=True):
                sums[i] = total
        for i in plan.large:
            sums[i] = self._sums[i]
        for i, total in sparse.items():
            sums[i] = total
        return sums

    def _write_buffers(self, memories: Sequence[PackMemory]) -> None:
        values = {i: part for memory in memories for i, part in memory.buffers.items()}
        if values:
            self.tensors.write_buffers(values)

    def _plan_of_all(
        self, kinds: bytes, buffers: BufferLayout | None, name: str
    ) -> GradientPlan:
        """The plan for what all workers have, after the one that was predicted."""
        verdict, plan = self._verdict, self._plan
        assert verdict is not None
        assert plan is not None
        self._note_leaving(verdict.some_leave)
        if not verdict.all_are_there:
            return self._agree(kinds, buffers, name)
        self._workers.take_compared()
        is_as_predicted = kinds == plan.kinds and buffers == plan.buffers
        return plan if is_as_predicted else self._plans.of(kinds, buffers)

    def _kinds_of(self, own: list[Any]) -> bytes:
        """What this worker has as the gradient of each parameter."""
        # Mostly, all parameters have a dense gradient.
        self._are_dense = are_there_and_dense(own)
        if self._are_dense:
            kinds = bytearray([DENSE]) * len(own)
            if (
                not self._num_parts
                and self._plan is not None
                and kinds == self._plan.kinds
            ):
                return self._plan.kinds  # as mostly, for a small model
        else:
            kinds = bytearray(
                NONE if g is None else SPARSE if g.is_sparse else DENSE for g in own
            )
        for i in (*self._sums, *self._waiting):
            kinds[i] = SEVERAL if kinds[i] else DENSE
        for i, times in self._num_parts.items():
            if times > 1 and kinds[i] == DENSE:
                kinds[i] = SEVERAL
        if self._plan is not None and kinds != self._plan.kinds:
            # Where others have a dense gradient, a sparse one is made dense. What once
            # came in parts is not sent early.
            for i, kind in enumerate(self._plan.kinds):
                if kinds[i] and kind >= DENSE:
                    kinds[i] = max(kinds[i], kind)
        return bytes(kinds)

    def _mark(self, kinds: bytes, buffers: BufferLayout | None, name: str) -> Mark:
        told = kinds if buffers is None else kinds + repr(buffers).encode()
        place, counted = zlib.crc32(told, self._workers.place(name)), self._counted
        if counted is None:
            return Mark(place, self._mentions.mark(), self._workers.is_asked_to_leave)
        place ^= counted.mark
        return Mark(
            place,
            self._mentions.mark(),
            self._workers.is_asked_to_leave,
            counted.numbers,
        )

    def _agree(
        self, kinds: bytes, buffers: BufferLayout | None, name: str
    ) -> GradientPlan:
        """Asks all workers what they have.

        Raises:
            WorkerError: If they are at different places, or differ where they must not.
        """
        self._workers.compare(
            "the buffers of the modules:", self.tensors.shown_buffers()
        )
        place = self._workers.place(name)
        compared_before = self._workers.take_compared()[: self._num_compared]
        leaves, number = self._workers.is_asked_to_leave, self._mentions.mark()
        of_all = self._workers.all_gather_object(
            (self._counts, list(kinds), buffers is not None, leaves, number, place),
            name,
        )
        *_, leave, mentioned, places = zip(*of_all, strict=True)
        if len(set(places)) > 1:
            # An optimizer that the program has dropped is compared for as long as it is
            # alive. In some workers, Python's collector of cycles may have come to it,
            # and in others not.
            gc.collect()
            for what, value in compared_before:
                self._workers.compare(what, value)
            self._mentions.note_compared()
            self._workers.compare(
                "the buffers of the modules:", self.tensors.shown_buffers()
            )
            self._workers.all_gather_object(None, name)
        self._verdict = Verdict(True, len(set(mentioned)) == 1, any(leave))
        self._note_leaving(any(leave))
        counting = [told for told in of_all if told[0]] or of_all
        some = bytes(
            max(column)
            for column in zip(*(kinds for _, kinds, *_ in counting), strict=True)
        )
        has_written = any(written for _, _, written, *_ in counting)
        return self._plans.of(some, self.tensors.layout() if has_written else None)

    def _note_leaving(self, some_leave: bool) -> None:
        self._workers.all_leave |= some_leave
        self.has_exchanged = True

    # What becomes of the sums

    def _add_earlier_and_call_hooks(self, totals: list[torch.Tensor | None]) -> None:
        """Adds earlier gradients to the sums, which are in `.grad`, and calls hooks."""
        for hooks in self._hooks:  # from here on, a hook may remove itself and others
            hooks.give_back()
        try:
            for hooks in self._hooks:
                hooks.call_on_gradient()
        except BaseException:
            self._restore_gradients()
            raise
        for parameter, old in self._earlier:
            parameter.grad = add(old, parameter.grad)
        if self._earlier or self._hooks:
            self._assigned.note_all()
        else:
            self._assigned.note(totals)
        self._earlier, self._sums = [], {}
        for hooks in self._hooks:
            hooks.call_on_accumulated()

    def send_buffers(self) -> None:
        """Gives all workers the buffers that the step wrote since its last backward."""
        buffers = self.tensors.layout_of_written()
        if buffers is None:
            return
        with without_autograd():
            own: list[torch.Tensor | None] = [None] * len(self.tensors.parameters)
            self._sums, self._waiting, self._under_way, self._are_dense = (
                {},
                {},
                [],
                False,
            )
            self._name = "the buffers that the step has written"
            self._num_compared = self._workers.num_compared
            plan = self._agree(bytes(len(own)), buffers, self._name)
            self._write_buffers(self._send_and_await(plan, own))

    def begin_unforeseen(self, device: torch.device | None) -> None:
        """Sends zeros, so that all workers ask one another and send once more.

        The next backward is not the one that the others foresee.

        Backward begins after that, since it has to know the weights.

        Args:
            device: Where the counts of the others travel. None: with their marks.
        """
        self._is_unforeseen = True
        self._num_backwards += 1  # as if it had begun
        self._name = f"the gradients of backward {self._num_backwards} of {self._step}"
        if with_gradients(self.tensors.parameters):
            self.settle_assigned(self._name)
        self._num_backwards -= 1
        self._compare()
        plan = self._plan = self._plans.predicted
        if plan is None:  # they ask at once
            return
        self._counted = CountedGradients.unforeseen(device)
        self._sums, self._waiting, self._num_parts, self._under_way, self._are_dense = (
            {},
            {},
            {},
            [],
            False,
        )
        own: list[torch.Tensor | None] = [None] * len(self.tensors.parameters)
        with without_autograd():
            self._send_with_mark(plan, own, plan.kinds, plan.buffers)
            self._await_sums()
        self._counted, self._unweighed = None, {}

    def settle_assigned(self, point: str, indices: Sequence[int] | None = None) -> None:
        """Makes gradients that the step has assigned those of the whole batch.

        Args:
            point: Where the step is, as the user would write it.
            indices: The positions of parameters. None: of all.
        """
        # A backward, also one that begins, compares the workers.
        found = (
            self._assigned.find(indices)
            if self._num_backwards
            else self._assigned.find_written(indices)
        )
        if found:
            with without_autograd():
                self._assigned.add_up(found, self.weight, self._total_weight, point)

    def has_others(self, indices: Sequence[int]) -> bool:
        """Whether parameters here have gradients that no backward of a run has made.

        `indices` are the positions of the parameters.
        """
        return bool(self._assigned.find(indices))

    def _undo(self) -> None:
        """A backward has raised: gradients and hooks are as before it."""
        for hooks in self._hooks:
            hooks.give_back()
        self._restore_gradients()

    def _restore_gradients(self) -> None:
        for parameter in self.tensors.parameters:
            parameter.grad = None
        for parameter, gradient in self._earlier:
            parameter.grad = gradient
        self._assigned.note_all()
