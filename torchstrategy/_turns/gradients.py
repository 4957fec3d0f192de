"""The end of a backward: `.grad` becomes the gradient of the whole batch.

Each replica's backward adds to `.grad` as in plain PyTorch. Where the outermost
backward ends, the replicas meet: their gradients are weighed and added up, and from
there on `.grad` of each replica is a plain tensor with the sum. So a step may read it,
clip it, add to it or clear it, and the library hears of nothing of this. Before
something is done with it that cannot be taken back, which is an update or the end of
the run, it looks at what the replicas have left.

It is as in a worker with one replica: see `_run/own/own_gradients` and Note [Gradients
that a step assigns].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple, final

import torch

from torchstrategy._base.context import without_autograd
from torchstrategy._base.marks import version_of
from torchstrategy._base.options import ReduceOp
from torchstrategy._base.torch_internals import (
    are_alone_in_memory,
    foreach_mul_,
    have_gradient_hooks,
    raw_grads,
    set_raw_grads,
    versions,
)
from torchstrategy._group.group import Replica
from torchstrategy._group.instruments import tell_combined_gradients
from torchstrategy._group.participants import Participants
from torchstrategy._group.transfer import copy_to, in_own_memory
from torchstrategy._group.weighing import add_weighted, factor_for, weighted_sum
from torchstrategy._run.own.gradient_parts import add, all_laid_out, refuse_graphs
from torchstrategy._run.own.user_hooks import UserHooks
from torchstrategy._turns import refusals
from torchstrategy._turns.image import Exchange, Image
from torchstrategy._turns.numbers import are_same_numbers

Gradient = torch.Tensor | None


class Known:
    """What earlier runs of a step have shown of its gradients.

    Attributes:
        are_written: Whether replicas write on `.grad` in place. Then each gets its own.
        num_runs: How many runs there were.
    """

    are_written = False
    num_runs = 0


@final
class LossOfReplica:
    """The gradients of one replica, as far as its losses have to do with them.

    Attributes:
        loss_factor: See `GradientsOfReplica` in `_run/losses/loss_watchers`.
        drops: Whether the backward under way adds nothing.
        num_backwards: How many backwards the replica has run.
    """

    def __init__(self) -> None:
        self.loss_factor: float | None = 1.0
        self.drops = False
        self.num_backwards = 0

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """A block in which backward adds nothing."""
        self.drops = True
        try:
            yield
        finally:
            self.drops = False


class _Brought(NamedTuple):
    """What a replica brings to where a backward ends."""

    replica: int
    earlier: list[Gradient] | None  # its gradients from before; None: it had none
    makes_graph: bool


@dataclass(eq=False)
class _Lent:
    """Gradients that one image has, or several.

    Those of several are one tensor for all until one of them writes on it.
    """

    gradients: list[Gradient]
    versions: list[int]
    images: list[Image]

    def are_written(self) -> bool:
        return versions(_there(self.gradients)) != self.versions


# Acts for all replicas with some gradients; gives the image that does.
Act = Callable[[list[Gradient]], AbstractContextManager[Image]]


@final
class BatchGradients:
    """The gradients of all replicas in one run.

    Args:
        exchange: Puts images on.
        images: Of the replicas that take part, in their order.
        weights: How much each replica counts.
        name_of: What the user calls a parameter, by its position.
        known: What earlier runs have shown.
        take_off: Takes an image off, and looks at what was written.
        act: Calls hooks of the user's, once for all replicas.
    """

    def __init__(
        self,
        exchange: Exchange,
        images: Mapping[int, Image],
        weights: Participants,
        name_of: Callable[[int], str],
        known: Known,
        take_off: Callable[[], None],
        act: Act,
    ) -> None:
        self._exchange, self._weights, self._name_of = exchange, weights, name_of
        self._known, self._take_off, self._act = known, take_off, act
        known.num_runs += 1
        # See Note [Writes that change no version] in `_turns/memory`: in some runs each
        # replica has gradients of its own, and the numbers are compared.
        self._compares = known.num_runs & (known.num_runs - 1) == 0
        self._lent_sums: list[Gradient] = []  # in these runs, as they were lent
        self._parameters = exchange.parameters
        self._images = images
        self._lead, *self._others = images.values()
        self.of_replicas = {r: LossOfReplica() for r in images}
        self._lent: list[_Lent] = []
        self._hooks: list[UserHooks] = []
        # The tensors that were there before the run and were written by it, each with
        # the values of before.
        self._undo: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._users = {id(g): g for g in exchange.users.grads if g is not None}
        counting = {weights.weights[r] for r in weights.weighing}
        # See Note [A gradient that replicas add to one after the other].
        self._is_alike = len(counting) == 1 and all(i.is_home for i in images.values())
        self._partial: list[Gradient] | None = None
        self._added: list[int] = []
        self._lend_users()

    def _lend_users(self) -> None:
        """Shows all replicas the gradients that the program's own parameters have."""
        users = self._exchange.users.grads
        lists = [
            self._on(image, users, is_own=image is self._lead)
            for image in self._images.values()
        ]
        self._lend(lists)

    def _on(
        self, image: Image, gradients: list[Gradient], is_own: bool
    ) -> list[Gradient]:
        """Gradients of the program's device, on that of an image.

        Args:
            image: The image.
            gradients: The gradients.
            is_own: Whether they may be the very tensors, where the device is the same.
        """
        if (image.is_home and is_own) or _ONLY_NONE.issuperset(map(type, gradients)):
            return list(gradients)
        # A parameter that was given other memory may have a gradient of before, which
        # nobody can put there again.
        fits = [
            g is not None and g.shape == p.shape
            for g, p in zip(gradients, self._parameters, strict=True)
        ]
        there = [
            g.detach()
            for g, fit in zip(gradients, fits, strict=True)
            if fit and g is not None
        ]
        if image.is_home:
            copies = [g.clone() for g in there]
        else:
            copies = [in_own_memory(g) for g in copy_to(there, image.device)]
        in_order = iter(copies)
        left = gradients if image.is_home else [None] * len(gradients)
        return [
            next(in_order) if fit else old for fit, old in zip(fits, left, strict=True)
        ]

    # Lending

    def _lend(self, lists: Sequence[list[Gradient]]) -> None:
        """Gives each image a list of gradients; those with the same list share it."""
        by_ids: dict[tuple[int, ...], _Lent] = {}
        for image, gradients in zip(self._images.values(), lists, strict=True):
            image.grads = gradients
            key = tuple(map(id, gradients))
            if key in by_ids:
                by_ids[key].images.append(image)
            else:
                now = versions(_there(gradients))
                by_ids[key] = _Lent(list(gradients), now, [image])
        self._lent = list(by_ids.values())

    def lend_sums(self, totals: list[Gradient]) -> None:
        """Shows all replicas the sums.

        The lead gets them, and the others share a copy: as long as the lead's are
        unwritten, a replica that writes on the copy can be told apart.
        """
        if self._compares:
            self._lent_sums = [None if g is None else g.clone() for g in totals]
        lists: list[list[Gradient]] = []
        shared: dict[torch.device, list[Gradient]] = {}
        for image in self._images.values():
            if image is self._lead and image.is_home:
                lists.append(totals)
            elif self._has_own or image.device not in shared:
                own = shared[image.device] = self._on(image, totals, is_own=False)
                lists.append(own)
            else:
                lists.append(list(shared[image.device]))
        self._lend(lists)

    def note_writes(self) -> None:
        """Gives images gradients of their own, if one has written on what they share.

        Called when the image that was on has been taken off.
        """
        written = [lent for lent in self._lent if lent.are_written()]
        if not written:
            return
        self._known.are_written = True
        unwritten = next((one for one in self._lent if one not in written), None)
        if unwritten is not None:
            self._keep_users(written, unwritten)
        kept: list[_Lent] = []
        for lent in self._lent:
            first, *others = lent.images
            if self._exchange.on in others:  # the one that has written keeps its own
                others = [first, *(o for o in others if o is not self._exchange.on)]
                first = self._exchange.on
            kept.append(_Lent(lent.gradients, lent.versions, [first]))
            source = lent if lent not in written else unwritten
            for image in others:
                assert source is not None, "the lead has gradients of its own"
                fresh = self._on(image, source.gradients, is_own=False)
                by_id = {
                    id(old): new
                    for old, new in zip(lent.gradients, fresh, strict=True)
                    if old is not None
                }
                image.grads = [by_id.get(id(g), g) for g in image.grads]
                kept.append(_Lent(fresh, versions(_there(fresh)), [image]))
        self._lent = kept

    def _keep_users(self, written: Sequence[_Lent], unwritten: _Lent) -> None:
        """Keeps the values of the program's own gradients that were written."""
        for lent in written:
            for gradient, value in zip(
                lent.gradients, unwritten.gradients, strict=True
            ):
                if gradient is None or value is None or id(gradient) not in self._users:
                    continue
                if id(gradient) not in self._undo and not value.is_sparse:
                    clone = value.detach().to(gradient.device, copy=True)
                    self._undo[id(gradient)] = gradient, clone

    # A backward

    def run_backward(
        self, replica: Replica, backward: Callable[[], Any], makes_graph: bool
    ) -> Any:
        """Runs the outermost backward of a replica, on the thread of its step."""
        of_replica, image = self.of_replicas[replica.index], self._images[replica.index]
        parameters = self._parameters
        found = raw_grads(parameters)
        has_some = not _ONLY_NONE.issuperset(map(type, found))
        earlier = found if has_some else None
        if has_some:
            set_raw_grads(parameters, [None] * len(parameters))
        self._take_hooks()
        adds = (
            self._is_alike
            and earlier is None
            and not (makes_graph or of_replica.drops)
            and replica.index in self._weights.weighing
        )
        begun = self._partial if adds else None
        if begun is not None:
            set_raw_grads(parameters, begun)
        try:
            result = backward()
        except BaseException:
            set_raw_grads(parameters, earlier or [None] * len(parameters))
            raise
        of_replica.num_backwards += 1
        if of_replica.drops:
            set_raw_grads(parameters, [None] * len(parameters))
        elif adds and self._partial is begun:
            # Else another replica has run its backward within this one's, which has
            # waited in a collective.
            self._partial = raw_grads(parameters)
            self._added.append(replica.index)
        name = f"the gradients of backward {of_replica.num_backwards}"
        brought = _Brought(replica.index, earlier, makes_graph)
        replica.synchronize(name, self._combine, brought, is_for_some=True)
        if makes_graph:
            refuse_graphs(parameters)
            image.grads = raw_grads(parameters)
            self._lend_again(image)
        return result

    def _take_hooks(self) -> None:
        # The first replica takes them off, for all.
        if not self._hooks and have_gradient_hooks(self._parameters):
            self._hooks = [
                UserHooks(parameter)
                for parameter in reversed(self._parameters)
                if have_gradient_hooks((parameter,))
            ]

    def _combine(self, brought: Sequence[_Brought]) -> list[None]:
        """Adds up what a backward has made in all replicas.

        It runs once for all, on the thread that called `run`. Replicas that run no such
        backward, since they stand elsewhere or have ended, get the sum, too.
        """
        with without_autograd():
            self._take_off()
            hooks, self._hooks = self._hooks, []
            for one in hooks:
                one.give_back()
            earlier = {one.replica: one.earlier for one in brought}
            totals = self._sum(set(earlier), any(one.makes_graph for one in brought))
            tell_combined_gradients()
            if hooks:
                totals = self._call(hooks, totals, UserHooks.call_on_gradient)
            for r, image in self._images.items():
                if r not in earlier:
                    has_none = _ONLY_NONE.issuperset(map(type, image.grads))
                    earlier[r] = None if has_none else image.grads
            if any(old is not None for old in earlier.values()):
                for r, image in self._images.items():
                    image.grads = earlier[r] or [None] * len(totals)
                self.settle()  # what the steps have assigned themselves
                in_order = [image.grads for image in self._images.values()]
                self._lent_sums = []  # they are no longer alone in `.grad`
                self._lend(self._add_earlier(in_order, totals))
            else:
                self.lend_sums(totals)
            if hooks:
                here = self._on_home(self._lead.grads)
                self.lend_sums(self._call(hooks, here, UserHooks.call_on_accumulated))
        return [None] * len(brought)

    def _sum(self, those: set[int], makes_graph: bool) -> list[Gradient]:
        partial, added = self._partial, self._added
        self._partial, self._added = None, []
        total: dict[int, torch.Tensor] = {}
        weights = self._weights.weights
        if partial is not None:
            weight = weights[added[0]]
            if set(added) == those & set(self._weights.weighing):
                if weight != 1 and are_alone_in_memory(_there(partial)):
                    _multiply(_there(partial), weight)
                elif weight != 1:  # it may be an array of the program's
                    partial = [None if g is None else g * weight for g in partial]
                return all_laid_out(partial, self._parameters)
            add_weighted(total, _by_position(partial), weight)
        for r in self._weights.weighing:
            if r not in added and r in those:
                image = self._images[r]
                own = self._on_home(image.grads) if not image.is_home else image.grads
                add_weighted(
                    total,
                    _by_position(own),
                    weights[r],
                    are_ours=image.is_home and not makes_graph,
                )
        totals = [total.get(i) for i in range(len(self._parameters))]
        if makes_graph:
            totals = [None if g is None else g.detach() for g in totals]
        return all_laid_out(totals, self._parameters)

    def _on_home(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Gradients on the devices of the program's own parameters."""
        home = self._exchange.users.device
        there = _there(gradients)
        if all(g.device == home for g in there):
            return list(gradients)
        in_order = iter(copy_to([g.detach() for g in there], home))
        return [None if g is None else next(in_order) for g in gradients]

    def _add_earlier(
        self, before: Sequence[list[Gradient]], totals: list[Gradient]
    ) -> list[list[Gradient]]:
        """For each image, the gradients that it had, plus the sums."""
        for i, column in enumerate(zip(*before, strict=True)):
            if len({old is None for old in column}) > 1:
                raise RuntimeError(refusals.unlike_clearing(self._name_of(i)))
        known: dict[int, torch.Tensor] = {}  # by the id of an earlier one
        fresh: dict[tuple[int, torch.device], torch.Tensor] = {}
        lists: list[list[Gradient]] = []
        for image, of_image in zip(self._images.values(), before, strict=True):
            new: list[Gradient] = []
            for i, (old, total) in enumerate(zip(of_image, totals, strict=True)):
                if total is None:
                    new.append(old)
                    continue
                is_leads = image is self._lead and image.is_home
                if old is None and is_leads:
                    new.append(total)
                elif old is None:
                    if (i, image.device) not in fresh or self._has_own:
                        fresh[i, image.device] = total.to(image.device, copy=True)
                    new.append(fresh[i, image.device])
                else:
                    if id(old) not in known:
                        self._keep(old)
                        there = total.to(image.device)
                        known[id(old)] = (
                            old + there if _overlaps(old) else add(old, there)
                        )
                    new.append(known[id(old)])
            lists.append(new)
        return lists

    def _keep(self, gradient: torch.Tensor) -> None:
        """Keeps the values of a gradient of the program's own that is written."""
        if id(gradient) in self._users and not gradient.is_sparse:
            self._undo.setdefault(id(gradient), (gradient, gradient.detach().clone()))

    def _call(
        self,
        hooks: Sequence[UserHooks],
        gradients: list[Gradient],
        call: Callable[[UserHooks], None],
    ) -> list[Gradient]:
        with self._act(gradients) as image, torch.enable_grad():
            for one in hooks:
                call(one)
        return image.grads

    # What replicas have left of the gradients of the batch

    def settle(self) -> list[Gradient]:
        """The gradients of the whole batch, after what the replicas did to them.

        They are on the devices of the program's own parameters. Each image was taken
        off.

        Raises:
            RuntimeError: If the replicas did different things that make no gradient of
                the whole batch.
        """
        images = list(self._images.values())
        of_batch = [self._batch_of(image) for image in images]
        self._note_uncounted()
        if not self._has_own and all(
            all(map(is_, image.grads, known))
            for image, known in zip(images, of_batch, strict=True)
        ):
            return self._on_home(self._lead.grads)
        columns = zip(*(image.grads for image in images), strict=True)
        known = zip(*of_batch, strict=True)
        settled: dict[int, Gradient] = {}
        for i, (column, batch) in enumerate(zip(columns, known, strict=True)):
            total = self._settle_one(i, column, batch)
            if total is not column[0]:
                settled[i] = total
        if settled:
            self._show(settled)
        return self._on_home(self._lead.grads)

    @property
    def _has_own(self) -> bool:
        """Whether each replica has gradients of its own."""
        return self._known.are_written or self._compares

    def _note_uncounted(self) -> None:
        """Finds whether replicas have written on gradients without being counted."""
        lent, self._lent_sums = self._lent_sums, []
        for image in self._images.values() if not self._known.are_written else ():
            for gradient, sent in zip(image.grads, lent, strict=False):
                if gradient is not None and sent is not None:
                    here = gradient.detach().to(sent.device)
                    if not are_same_numbers(here, sent.detach()):
                        self._known.are_written = True
                        return

    def _settle_one(
        self, i: int, column: Sequence[Gradient], batch: Sequence[Gradient]
    ) -> Gradient:
        """What one parameter's gradients of all replicas become."""
        there = [g for g in column if g is not None]
        if not there:
            return None
        if len(column) == 1:
            return column[0]
        are_of_batch = [g is None or g is b for g, b in zip(column, batch, strict=True)]
        if len(there) < len(column):
            if any(
                g is not None and g is b for g, b in zip(column, batch, strict=True)
            ):
                raise RuntimeError(refusals.unlike_clearing(self._name_of(i)))
            there = [
                torch.zeros_like(self._parameters[i], device=image.device)
                if g is None
                else g
                for g, image in zip(column, self._images.values(), strict=True)
            ]
        home = (
            self._parameters[i].device
            if self._lead.is_home
            else self._exchange.users.device
        )
        here = [g.detach().to(home) for g in there]
        if all(are_same_numbers(g, here[0]) for g in here[1:]):
            return column[0] if column[0] is not None else here[0]
        if all(are_of_batch):
            counts = {r: one.num_backwards for r, one in self.of_replicas.items()}
            if len(set(counts.values())) > 1:
                raise RuntimeError(refusals.unequal_backwards(counts))
            if any(map(self._is_unwritten, self._images.values())):
                raise RuntimeError(refusals.unlike_clearing(self._name_of(i)))
            # Each has written numbers of its own on them.
            return weighted_sum(here, self._fractions())
        written = [
            g is not None and g is not b and version_of(g) > 0
            for g, b in zip(column, batch, strict=True)
        ]
        if any(written):
            raise RuntimeError(refusals.changed_own_rows(self._name_of(i)))
        is_sum = self._weights.reduction is not ReduceOp.MEAN
        if is_sum and any(b is not None for b in batch):
            raise RuntimeError(refusals.ambiguous_sum(self._name_of(i)))
        weights = [self._weights.weights[r] for r in self._images]
        pairs = [(g, w) for g, w in zip(here, weights, strict=True) if w]
        return weighted_sum([g for g, _ in pairs], [w for _, w in pairs])

    def _fractions(self) -> list[float]:
        return [self._weights.fractions[r] for r in self._images]

    def _is_unwritten(self, image: Image) -> bool:
        return not next(one for one in self._lent if image in one.images).are_written()

    def _batch_of(self, image: Image) -> list[Gradient]:
        """The gradients of the whole batch, as they were lent to an image."""
        return next(one.gradients for one in self._lent if image in one.images)

    def _lend_again(self, image: Image) -> None:
        """Says that all that an image has is of the whole batch."""
        others = [
            _Lent(
                one.gradients, one.versions, [i for i in one.images if i is not image]
            )
            for one in self._lent
        ]
        own = _Lent(list(image.grads), versions(_there(image.grads)), [image])
        self._lent = [*(one for one in others if one.images), own]

    def _show(self, settled: Mapping[int, Gradient]) -> None:
        """Shows all replicas what became of some gradients."""
        lists = []
        for image in self._images.values():
            mine = list(image.grads)
            for i, total in settled.items():
                mine[i] = None if total is None else total.to(image.device, copy=True)
            lists.append(mine)
        self._lend(lists)

    # The end

    def keep(self) -> None:
        """An update has been made: a failure later leaves what it has left."""
        self._undo.clear()
        self._users = {}

    def undo(self) -> None:
        """Writes the values of before the run on the program's own gradients."""
        for one in self._hooks:
            one.give_back()
        self._hooks = []
        for gradient, values in self._undo.values():
            gradient.detach().copy_(values)
        self._undo.clear()


def _there(gradients: Sequence[Gradient]) -> list[torch.Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


def _by_position(gradients: Sequence[Gradient]) -> dict[int, torch.Tensor]:
    return {i: g for i, g in enumerate(gradients) if g is not None}


def _multiply(gradients: list[torch.Tensor], weight: float) -> None:
    if not gradients:
        return
    if any(g.is_sparse or g.is_conj() or g.is_neg() for g in gradients):
        for gradient in gradients:
            gradient.mul_(weight)
    else:
        foreach_mul_(gradients, factor_for(weight, gradients))


def _overlaps(gradient: torch.Tensor) -> bool:
    """Whether several numbers of a gradient are in one place, as of an expanded one."""
    if gradient.layout is not torch.strided:
        return False
    pairs = zip(gradient.stride(), gradient.shape, strict=True)
    return any(stride == 0 and size > 1 for stride, size in pairs)


_ONLY_NONE = frozenset({type(None)})

# Note [A gradient that replicas add to one after the other]
# Where all replicas have the same weight and the memory of the program's own
# parameters, the next replica begins its backward with the gradients that the last one
# has left. So autograd adds them up while they are in the processor's caches, and there
# is one gradient in memory.
