"""The copies of all replicas, made once and kept in step with the user's modules.

A replica's modules are real modules with real leaf parameters. What the user writes on
the modules between runs (`train()`, a dropout rate, a frozen layer, loaded weights)
reaches the copies before the next run. What a step writes on buffers and plain
attributes of its own copy (`model.train()`, a counter) reaches the user's modules after
the run.

                        parameters                              buffers
    the user's module   the values; the optimizer writes them   the values between runs
    a replica's copy    the same memory on the same device,     memory of its own
                        else memory of its own
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrategy._base.devices import memory_device
from torchstrategy._base.marks import Versions
from torchstrategy._base.memory import has_lost_memory, memory_id
from torchstrategy._base.objects.changes import MISSING, Edit, Snapshot, are_same
from torchstrategy._base.objects.module_traversal import (
    HOOK_FLAGS,
    HOOK_TABLES,
    tables_of,
)
from torchstrategy._base.objects.proxies import has_own_code_only, plain_class
from torchstrategy._base.torch_internals import (
    have_gradient_hooks,
    keeping_version,
    requires_grad_of,
)
from torchstrategy._base.trace import traced
from torchstrategy._base.writes import TrackedTensors, Writes
from torchstrategy._copies.attributes.kept_by_hooks import KeptByHooks
from torchstrategy._copies.attributes.late_attributes import Later, find_late
from torchstrategy._copies.gradients.replica_gradients import (
    ReplicaParameter,
)
from torchstrategy._copies.modules.module_replica import (
    ModuleReplica,
    Originals,
    list_changes,
)
from torchstrategy._copies.modules.plain_attributes import PlainAttributes
from torchstrategy._copies.modules.running_statistics import average_unread, find_unseen
from torchstrategy._copies.references.deep_copies import ClosureRebinder
from torchstrategy._copies.refusals import refuse_uncopyable
from torchstrategy._copies.run_warnings import LostNumbers
from torchstrategy._copies.tensor_copies import (
    copy_tensors,
    group_by_memory,
    set_trained,
)
from torchstrategy._group.participants import Participants
from torchstrategy._group.transfer import write
from torchstrategy._group.workers import BETWEEN_RUNS
from torchstrategy._run import worker_values
from torchstrategy._run.metrics import metrics_of
from torchstrategy._run.module_tensors import is_running, tensors_in
from torchstrategy._run.placement import Placement
from torchstrategy._run.refusals import written_parameter
from torchstrategy._variables.variable import Variable

# For each replica that took part, what its step did to buffers and hooks.
Changes = Sequence[Sequence[Edit]]
# Buffers that a step made, by their tables and names.
Made = dict[tuple[Any, str], torch.Tensor]


# Note [Who may write a parameter]
# - Between runs: the user, in any way that there is. The next run brings the values to
#   the copies (`refresh`).
# - In a run: an optimizer of the strategy, `Variable.assign`, and a merge function.
#   They write on the user's own parameters at a synchronization point, while all
#   replicas stand still, within `ReplicatedRun._published`. An optimizer that calls a
#   closure does so on the thread of the first replica. Then `refresh_parameters` brings
#   the values to the copies that have memory of their own, unless `OptimizerCopies` has
#   updated these alike.
# - In a run, too: a hook that the user has registered on a parameter. It is called once
#   for all replicas, where gradients are reduced: at a synchronization point, or when
#   the run ends. Then the next run brings the values.
# - When a run begins and a worker has new modules or variables:
#   `take_from_first_worker`, which is not undone.
# - Never the step itself, and no thread that it starts: every replica would write once.
#   `ReplicatedRun` looks for such writes before each update and at the end of the run.
#   `check_unwritten` compares the version counters, and refuses the run. A replica's
#   `.data` counts its writes, unlike torch's (`ReplicaParameter.data`).
# - While another run has the same parameters, the same rules hold, but versions are not
#   compared: a changed version may come from the other run
#   (`GradientReducer.is_alone`).
# A strategy with a plain `Storage` has one replica, which uses the user's own
# parameters. Its step may write on them.
@final
class ReplicatedModules:
    """The copies that all replicas have of the user's modules.

    Args:
        roots: The user's modules that are part of no other.
        placement: Where the copies are, and how they are kept in step.
        variables: Variables to be copied, too, whether or not they are in a module.

    Raises:
        TypeError: If a module cannot be copied; it is named, with what to do.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        placement: Placement,
        variables: Sequence[Variable],
    ) -> None:
        self._placement, self._workers = placement, placement.workers
        self._home = memory_device(placement.parameter_device)
        named = [
            pair
            for root in roots
            for pair in root.named_modules(prefix=type(root).__name__)
        ]
        paths = {id(module): path for path, module in reversed(named)}
        modules = list({id(module): module for _, module in named}.values())
        in_modules = {
            id(parameter)
            for module in modules
            for parameter in module.parameters(recurse=False)
        }
        loose = [variable for variable in variables if id(variable) not in in_modules]
        refuse_uncopyable(roots, further=loose)
        # The user's modules are referred to weakly, and only their `__dict__`s are
        # held: the modules die with the user's last reference, and then the storage
        # drops the copies.
        self._references = [weakref.ref(module) for module in modules]
        self._insides = [module.__dict__ for module in modules]
        self._paths = [paths[id(module)] for module in modules]
        parameters, buffers = (
            tensors_in(modules, table) for table in ("_parameters", "_buffers")
        )
        self._parameters = TrackedTensors(parameters.values(), loose)
        # What the user calls each of the `owners`: `Net.layers.0.weight`
        self.names = [f"{self._paths[i]}.{name}" for i, name in parameters] + [
            variable.name for variable in loose
        ]
        self._slots = list(buffers)
        self._buffer_names = [f"{self._paths[i]}.{name}" for i, name in self._slots]
        running = {
            index
            for index, (i, name) in enumerate(self._slots)
            if is_running(modules[i], name)
        }
        self._buffers = TrackedTensors(buffers.values(), running=running)
        self.lost_numbers = LostNumbers()
        self._look = functools.partial(
            self.lost_numbers.look, id(next(iter(self._insides), None))
        )
        self.kept = KeptByHooks(
            modules, [*self.owners, *self._buffers.tensors], placement.devices
        )
        # Each replica has what hooks keep already.
        large = find_late(modules, self._insides)
        waiting = [
            (i, name)
            for i, name in large
            if id(self._insides[i][name]) not in self.kept.own[0]
        ]
        late = {(i, name): Later(f"{self._paths[i]}.{name}") for i, name in waiting}
        originals = Originals(
            roots,
            modules,
            self._parameters,
            self._buffers,
            self._slots,
            late,
            self.kept,
        )
        self.replicas = [
            ModuleReplica(originals, placement, r)
            for r in range(len(placement.devices))
        ]
        # Of the parameters of all replicas.
        self._trained = requires_grad_of(self.owners)
        # The ends of transfers of the run that is under way.
        self._sent: list[torch.Event] = []
        self._watch_parameters()
        self._buffers.watch()
        copies = [(replica.device, replica.insides) for replica in self.replicas]
        self.metrics = metrics_of(self._insides, self._paths, copies, placement.workers)
        # The position of each of the `owners`, by its id.
        self.index_of = {
            id(parameter): index
            for index, parameter in enumerate(self._parameters.tensors)
        }
        self._classes = list(map(type, modules))
        self._structure = Snapshot(tables_of(self._insides))
        # Whether a step made, removed or replaced buffers or hooks: then not all copies
        # agree with the user's modules.
        self._is_outdated = False
        self.attributes = PlainAttributes(
            self.replicas,
            originals,
            self._paths,
            self.names,
            self._buffer_names,
            self._home,
        )
        # The ids of the tensors that share memory with one another, in groups, and
        # their addresses then.
        self._overlaps: list[list[int]] = []
        self._pointers: list[list[int]] = []
        self._has_same_overlaps()
        # As the last run left them.
        self._buffer_versions = Versions(self._buffers.tensors)

    @property
    def owners(self) -> list[torch.Tensor]:
        """The user's parameters."""
        return self._parameters.tensors

    def originals(self) -> list[nn.Module]:
        """The user's modules."""
        return [
            module
            for reference in self._references
            if (module := reference()) is not None
        ]

    def known_in_replicas(self) -> dict[int, Any]:
        """By the ids of what the replicas have copies of: the user's objects."""
        return self.attributes.known_in_replicas(self._list_copied)

    def _list_copied(self) -> list[object]:
        """The user's modules, parameters and buffers."""
        return [*self.originals(), *self.owners, *self._buffers.tensors]

    def refresh(self) -> bool:
        """Brings what the user wrote on the modules to the copies.

        False if the copies have to be made anew.
        """
        # A layer that was added or replaced changes what there is to copy.
        if (
            self._is_outdated
            or not self._structure.is_same()
            or not self._have_same_classes()
        ):
            return False
        owners = self.owners
        if not self.attributes.bring(owners):
            return False
        written = self.refresh_parameters()
        trained = requires_grad_of(owners)
        if trained != self._trained:
            for replica in self.replicas:
                set_trained(replica.parameters, trained)
            self._trained = trained
        buffers = self._buffers
        found = buffers.take_changes()
        # All replicas agree, so one is looked at.
        unseen = (
            find_unseen(buffers.running - set(found.all), buffers, self.replicas[0])
            if buffers.running
            else []
        )
        changed = sorted({*found.all, *unseen})
        if self._workers.count > 1:
            # After a run, buffers that the run wrote count as changed, too.
            self._workers.mention(
                BETWEEN_RUNS, (written, self._buffer_versions.have_changed())
            )
        if changed:
            if not all(
                replica.can_bring_buffers(changed, self._buffers)
                for replica in self.replicas
            ):
                return False
            # A list, since all replicas get the values.
            if any(
                [
                    replica.bring_buffers(changed, self._buffers, found.unsure)
                    for replica in self.replicas
                ]
            ):
                self.attributes.take_new_buffers()
        # What was brought to one of these was written on all that share its memory.
        if self._overlaps:
            self.attributes.agree()
            for replica in self.replicas:
                replica.buffers.note()
        return self._has_same_overlaps()

    def _has_same_overlaps(self) -> bool:
        """Whether the same tensors share memory as when the copies were made."""
        tracked = self._parameters, self._buffers, self.attributes.tensors
        before, self._pointers = self._pointers, [one.pointers for one in tracked]
        if are_same(self._pointers, before):
            return True
        known, tensors = (
            self._overlaps,
            [tensor for one in tracked for tensor in one.tensors],
        )
        self._overlaps = sorted(
            [id(tensors[index]) for index in group]
            for group in group_by_memory(tensors)
        )
        return self._overlaps == known

    def _have_same_classes(self) -> bool:
        """Whether no module was given another class, as some libraries do to layers.

        They do so to patch them.
        """
        originals = self.originals()
        now = list(map(type, originals))
        # During a run of another thread they are proxies.
        are_known = now == self._classes or list(map(plain_class, now)) == list(
            map(plain_class, self._classes)
        )
        # Somebody may write a `__dict__`.
        return are_known and are_same(list(map(vars, originals)), self._insides)

    def check_workers(self) -> None:
        """Refuses a run that another worker has begun with other values.

        Called after an exchange in the run.
        """
        if BETWEEN_RUNS in self._workers.differing:
            self._workers.differing.discard(BETWEEN_RUNS)
            names, tensors = (
                [*self.names, *self._buffer_names],
                [*self.owners, *self._buffers.tensors],
            )
            worker_values.refuse_other_values(self._workers, names, tensors)

    def refresh_parameters(
        self, in_run: bool = False, optimizer: Optimizer | None = None
    ) -> list[int]:
        """Brings changed values of parameters to the copies. Returns their positions.

        Args:
            in_run: Whether the values were written in a run.
            optimizer: The optimizer of which a method was called since the last
                refresh, and nothing else.
        """
        # It is also called within a run, where a step may have set `requires_grad` on
        # its copies: that is not brought. Torch's own optimizers count their writes,
        # but for fused ones, whose parameters are noted.
        is_torchs_code = (
            self._is_watched and optimizer is not None and has_own_code_only(optimizer)
        )
        # A hook on a parameter is the user's, and may write through `.data`.
        counts_all = is_torchs_code and not have_gradient_hooks(self.owners)
        found = self._parameters.take_changes(counts_all)
        changed, moved = found.all, found.moved
        try:
            if changed:
                with traced("bring parameters"):
                    owners = self.owners
                    writes = [
                        replica.bring_parameters(owners, found)
                        for replica in self.replicas
                    ]
                    with keeping_version(self._uncounted_copies(found, in_run)):
                        self._sent += write(writes)
        except BaseException:
            # Some copies may not have got the values: the next refresh brings them
            # again.
            self._parameters.note_outdated(changed)
            raise
        for replica in self.replicas:
            replica.note_parameters()
        if moved:
            self._watch_parameters()
        return changed

    def _uncounted_copies(
        self, found: Writes, in_run: bool
    ) -> tuple[torch.Tensor, ...]:
        """The copies that keep their version.

        See Note [Writes that count, and writes that do not] in `writes`.
        """
        positions = found.uncounted if in_run else found.unsure
        return tuple(
            replica.parameters[index]
            for replica in self.replicas
            for index in positions
        )

    def wait_until_sent(self) -> None:
        """Waits until the values of parameters have left the user's memory.

        Before, nobody may write there.
        """
        while self._sent:
            self._sent.pop().synchronize()

    def _watch_parameters(self) -> None:
        """Looks for uncounted writes on parameters of which a replica has a real copy.

        Torch does not count such writes.
        """
        # See Note [What is aliased and what is copied]. Where all replicas share the
        # memory, nothing has to be brought.
        of_all = zip(*self.list_sharing(), strict=True)
        watched = [
            index for index, of_replicas in enumerate(of_all) if not all(of_replicas)
        ]
        self._is_watched = bool(watched)
        self._parameters.watch(watched)

    def list_sharing(self) -> list[list[bool]]:
        """For each replica, which of its parameters share the memory of the user's."""
        return [list(replica.aliased) for replica in self.replicas]

    def own_parameters(self) -> dict[int, dict[int, ReplicaParameter]]:
        """By replica, for those that have any: its parameters with memory of their own.

        They are by the ids of the user's.
        """
        found: dict[int, dict[int, ReplicaParameter]] = {}
        for r, replica in enumerate(self.replicas):
            for owner, local, is_shared in zip(
                self.owners, replica.parameters, replica.aliased, strict=True
            ):
                if not is_shared:
                    found.setdefault(r, {})[id(owner)] = local
        return found

    def note_updated(self, owners: Sequence[torch.Tensor]) -> None:
        """Says that the user's parameters and their copies were updated alike.

        They are all copies with memory of their own.
        """
        for replica in self.replicas:
            replica.note_parameters()
        self._parameters.note_agreement(self.index_of[id(owner)] for owner in owners)

    def note_written(self, parameters: Sequence[torch.Tensor]) -> None:
        """Says that some of the user's parameters were written without a count.

        Torch does not count such writes.
        """
        self._parameters.note_uncounted(
            self.index_of[id(p)] for p in parameters if id(p) in self.index_of
        )

    def check_unwritten(self, present: Sequence[int]) -> None:
        """Refuses writes of a step on parameters. See Note [Who may write a parameter].

        Raises:
            RuntimeError: Naming the parameter.
        """
        written = self._parameters.written()
        for r in present:
            written += self.replicas[r].written_parameters()
        if written:
            raise RuntimeError(written_parameter(self.names[min(written)]))

    def check_structure(self, present: Sequence[int]) -> Changes:
        """Refuses parameters and layers that a step made, replaced or removed.

        Returns:
            For each of the replicas, what its step did to buffers and hooks.

        Raises:
            RuntimeError: Naming it.
        """
        edits = list_changes([self.replicas[r] for r in present])
        for edit in chain.from_iterable(edits):
            where, table = self._paths[edit.place[0]], edit.place[1]
            if table in ("_parameters", "_modules"):
                raise RuntimeError(
                    _REBUILT.format(name=f"{where}.{edit.name}", verb=edit.verb())
                )
            if table in HOOK_TABLES and not (
                edit.after is MISSING or isinstance(edit.after, _FUNCTIONS)
            ):
                raise RuntimeError(
                    _HOOK.format(where=where, kind=type(edit.after).__name__)
                )
        return edits

    def put_together(self, weights: Participants, changes: Changes) -> None:
        """After a run, before the last exchange: makes one value of several.

        The replicas of this worker wrote them.
        """
        self._left_trained = self._check_flags(weights)
        made = sorted(
            f"{self._paths[edit.place[0]]}.{_describe_edit(edit)}"
            for edit in changes[0]
        )
        if made:
            self._workers.compare(
                "what the step did to buffers and hooks:", ", ".join(made)
            )
        # A message would follow each time, for which the host waits anyway.
        reads_all = self._workers.count > 1
        self._written = [
            self.replicas[r].written_buffers(self._buffers, reads_all)
            for r in weights.present
        ]
        replaced = sorted(
            set().union(
                *(replica.replaced_buffers() for replica in self._list_present(weights))
            )
        )
        self.attributes.put_together(weights, self._list_copied, self._look, replaced)
        if self._workers.count > 1:
            worker_values.mention_written(self._workers, set().union(*self._written))

    def return_to_originals(self, weights: Participants, changes: Changes) -> None:
        """Brings what `put_together` has made to the user's modules.

        It has made buffers and plain attributes.

        Running statistics of normalisation layers become the mean of the replicas',
        weighted by rows, if they are to be averaged. States of metrics are reduced as
        the metrics say. All else is taken from the first replica.
        """
        lead = self.replicas[weights.present[0]]
        indices = set().union(*self._written)
        if self._workers.count > 1:
            indices = worker_values.written_anywhere(self._workers, indices)
        values = self._buffer_values(weights, indices)
        new = self._find_new_buffers(weights, changes) if changes[0] else {}
        for metric in self.metrics:
            metric.put_together(weights)
        # The lines above may raise, and have written nothing of the user's yet. Nothing
        # below refuses anything.
        self.attributes.write_back()
        if any(changes):
            self._return_changes(lead, changes[0], new)
        for metric in self.metrics:
            metric.write_back()
        trained = self._left_trained
        if not trained == self._trained == requires_grad_of(self.owners):
            set_trained(self.owners, trained)
            self._trained = []  # unknown: replicas without rows may have others
        elsewhere = lead.replaced_buffers()
        replaced: dict[int, torch.Tensor] = {}
        for index, value in values.items():
            if index in elsewhere or not self._buffers.fits(index, value):
                replaced[index] = value
            else:
                self._buffers.take(index, value)
        if replaced:
            self._replace_buffers(replaced, lead)
        if self._workers.count > 1:
            self._buffer_versions.take()

    def _replace_buffers(
        self, values: Mapping[int, torch.Tensor], lead: ModuleReplica
    ) -> None:
        """Replaces buffers of the user's, as the first replica's step did.

        Whoever holds the tensor that was there before finds in it what plain PyTorch
        leaves there: what the step wrote on it in place, and nothing else.
        """
        places = Counter(
            map(
                id,
                chain.from_iterable(
                    inside["_buffers"].values() for inside in self._insides
                ),
            )
        )
        made = self._make_users_buffers(values, lead)
        self._is_outdated |= not self._structure.is_same() or len(
            set(map(memory_id, made.values()))
        ) < len(made)
        for index, after in made.items():
            before, (position, name) = self._buffers.tensors[index], self._slots[index]
            left = lead.buffers.tensors[index]
            if lead.buffers.is_counted(index) and left.shape == before.shape:
                self._buffers.take(index, left)
            # A tensor that is also in another place stays there, and is something else
            # from here on.
            self._is_outdated |= (
                places[id(before)] > 1 or id(before) in self.attributes.known_held
            )
            self._insides[position]["_buffers"][name] = after
            self._buffers.replace(index, after)
            self.attributes.replace_buffer(index, after)
            for replica in self.replicas:
                replica.local_objects[id(after)] = replica.local_objects.pop(id(before))
        self._structure.take()

    def _make_users_buffers(
        self, values: Mapping[int, torch.Tensor], lead: ModuleReplica
    ) -> dict[int, torch.Tensor]:
        """Tensors for buffers of the user's.

        What shares memory in the first replica shares memory in them, too.
        """
        known = self.known_in_replicas()
        owned = {
            memory_id(own): (own, known[id(own)])
            for own in lead.tensors(values)
            if id(own) in known
        }
        made = dict(
            zip(values, copy_tensors(list(values.values()), self._home), strict=True)
        )
        for index, value in values.items():
            placed = lead.buffer(index)
            own, users = owned.get(memory_id(placed), (None, None))
            is_its_value = memory_id(placed) >= 0 and memory_id(placed) == memory_id(
                value
            )
            if own is None or users is None or not is_its_value:
                continue  # memory that the step has made, or a mean over the replicas
            self._is_outdated = True
            if placed is own:
                made[index] = users
            elif own.stride() == users.stride():
                offset = (
                    placed.storage_offset()
                    - own.storage_offset()
                    + users.storage_offset()
                )
                made[index] = users.detach().as_strided(
                    placed.shape, placed.stride(), offset
                )
        return made

    def _find_new_buffers(self, weights: Participants, changes: Changes) -> Made:
        """The tensors that the first replica of all made or put in a buffer's place."""
        here: list[Made] = []
        for edits in changes:
            made: Made = {}
            for edit in edits:
                if isinstance(edit.after, torch.Tensor):
                    made[edit.place, edit.name] = edit.after.detach().cpu()
            here.append(made)
        told = [] if weights.is_understudy else here
        of_all = self._workers.all_gather_object(told, "the buffers that the step made")
        of_replicas = list(chain.from_iterable(of_all)) or here
        for key, value in of_replicas[0].items():
            (position, _), name = key
            others = [made[key] for made in of_replicas[1:] if key in made]
            path = f"buffer {self._paths[position]}.{name}"
            self.lost_numbers.look(id(self._insides[position]), path, value, others)
        return of_replicas[0]

    def _return_changes(
        self, lead: ModuleReplica, edits: Sequence[Edit], new: Made
    ) -> None:
        """Makes or removes hooks and buffers of the user's modules.

        The first replica's step did the same with its own.
        """
        self._is_outdated = True
        originals = {id(thing): thing for thing in self._list_copied()}
        back = {
            id(local): originals[key]
            for key, local in lead.local_objects.items()
            if key in originals
        }
        back.update(self.kept.map_to_users(lead.number))
        for edit in edits:
            position, table = edit.place
            original, local = self._insides[position], lead.insides[position]
            if table == "_buffers":
                made = new.get((edit.place, edit.name))
                after = (
                    edit.after
                    if made is None
                    else made.detach().to(self._home, copy=True)
                )
                original[_UNSAVED].discard(edit.name)
                original[_UNSAVED].update({edit.name} & local[_UNSAVED])
            else:
                # The function closes over the user's objects.
                after = ClosureRebinder(back).rebind(edit.after)
            edit._replace(after=after).apply(original[table])
            for flags in HOOK_FLAGS:
                if edit.name in local[flags]:
                    original[flags][edit.name] = True

    def _check_flags(self, weights: Participants) -> list[bool]:
        """Which parameters the step has left to be trained, in all replicas alike.

        Raises:
            RuntimeError: If replicas disagree. It names the parameter.
        """
        flags = [requires_grad_of(self.replicas[r].parameters) for r in weights.present]
        if self._workers.count > 1:
            self._workers.compare("which parameters are trained:", str(flags[0]))
            modes = [
                "train" if inside.get("training", True) else "eval"
                for inside in self._insides
            ]
            self._workers.compare("the modes of the modules:", " ".join(modes))
        for r, other in zip(weights.present[1:], flags[1:], strict=True):
            if other != flags[0]:
                name = next(
                    n
                    for n, one, two in zip(self.names, flags[0], other, strict=True)
                    if one != two
                )
                raise RuntimeError(
                    f"The replicas disagree whether {name} is trained: replica "
                    f"{weights.present[0]} and replica {r} left its requires_grad at "
                    "different values. Set it in every replica alike, or outside of "
                    "strategy.run."
                )
        return flags[0]

    def _list_present(self, weights: Participants) -> list[ModuleReplica]:
        return [self.replicas[r] for r in weights.present]

    def _buffer_values(
        self, weights: Participants, indices: set[int]
    ) -> dict[int, torch.Tensor]:
        """By position, the new values of the buffers that any replica wrote.

        Raises:
            RuntimeError: If replicas put tensors of different shapes or dtypes in the
                place of one.
        """
        present, fractions = (
            self._list_present(weights),
            [weights.fractions[r] for r in weights.present],
        )
        averaged = []
        can_average = (
            self._workers.count == 1
            and self._placement.averages_buffers
            and self._buffers.running
        )
        combined = (
            average_unread(indices, self._buffers, present, fractions)
            if can_average
            else {}
        )
        for index in sorted(indices - combined.keys()):
            original = self._buffers.tensors[index]
            values = [replica.buffer(index).detach() for replica in present]
            for value in values:
                if (values[0].shape, values[0].dtype) != (value.shape, value.dtype):
                    shapes = (
                        tuple(values[0].shape),
                        values[0].dtype,
                        tuple(value.shape),
                        value.dtype,
                    )
                    raise RuntimeError(
                        _REPLACED.format(self._buffer_names[index], *shapes)
                    )
                if has_lost_memory(value):
                    raise RuntimeError(_TAKEN_AWAY.format(self._buffer_names[index]))
            combined[index] = values[0]
            if index in self._buffers.running and self._placement.averages_buffers:
                averaged.append(index)
                combined[index] = _weighted_sum(values, fractions, original)
            elif index not in self._buffers.running:
                written = zip(values[1:], self._written[1:], strict=True)
                others = [value for value, of_replica in written if index in of_replica]
                module = id(self._insides[self._slots[index][0]])
                self.lost_numbers.look(
                    module, f"buffer {self._buffer_names[index]}", values[0], others
                )
        if self._workers.count > 1:
            worker_values.combine_over_workers(
                self._workers, combined, averaged, weights.lead_worker
            )
        return combined


def _weighted_sum(
    values: Sequence[torch.Tensor], weights: Sequence[float], like: torch.Tensor
) -> torch.Tensor:
    """The sum of tensors, each multiplied by its weight, where `like` is."""
    # What does not count may be NaN, and 0 * NaN is NaN.
    weighted = [
        value.to(like.device) * weight
        for value, weight in zip(values, weights, strict=True)
        if weight
    ]
    return torch.stack(weighted).sum(0) if weighted else torch.zeros_like(like)


_TAKEN_AWAY = (
    "The step has written {}, and has taken its memory away in a replica, as "
    "tensor.untyped_storage().resize_(0) does. After a run, a buffer has the values of "
    "the replicas. Take the memory away between runs, or train with one replica in "
    "each process, by MultiWorkerMirroredStrategy."
)

_UNSAVED = "_non_persistent_buffers_set"


def _describe_edit(edit: Edit) -> str:
    """What a step did to a buffer, or to hooks; their keys count for a process."""
    what = "made" if isinstance(edit.after, torch.Tensor) else "taken away"
    return (
        f"{edit.name} {what}"
        if edit.place[1] == "_buffers"
        else f"{edit.place[1]} {edit.verb()}"
    )


_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
)

_REBUILT = (
    "{name} was {verb} in a replica: the model and its optimizer would not have this "
    "change, and the other replicas would not, either. Do it outside of strategy.run. "
    "If forward makes it when it is first called, call the module with one batch "
    "before the first run; the module of a DataParallel is model.module."
)

_REPLACED = (
    "The replicas replaced the buffer {} by a tensor of shape {} and {}, and by one of "
    "shape {} and {}. The module can have one of them only. Make it of the same shape "
    "in all replicas, or keep such a value in a plain attribute."
)

_HOOK = (
    "A step registered a hook on {where} in a replica, and left it there: an object of "
    "the class {kind}, which may hold parts of that replica. Register it outside of "
    "strategy.run, remove it in the step, with handle.remove(), or make it a function."
)
