"""What a process does to runs: Ctrl-C at any moment, a fork, its end.

Each program has a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import textwrap
from pathlib import Path

import pytest

import torchstrategy
from conditions import for_changes, for_releases, needs_fork, needs_signals
from processes import python

ROOT = Path(torchstrategy.__file__).resolve().parents[1]


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in which a warning is an error.

    If it hangs, it exits with 1 and the stacks of its threads.
    """
    return python("-W", "error", "-c", textwrap.dedent(program), PYTHONPATH=str(ROOT))


# Ctrl-C


EVERYWHERE = """
    import json, os, signal, sys, threading
    import torch, torchstrategy
    from torch import nn
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    PACKAGE = os.path.dirname(torchstrategy.__file__)

    LOST = ("<genexpr>", "_dismiss", "_forget", "_forget_holder")

    class Hang(BaseException):
        pass

    def ring(*_):
        raise Hang

    signal.signal(signal.SIGALRM, ring)
    dead = []
    threading.excepthook = lambda hook: dead.append(f"it died of {hook.exc_type.__name__}")

    def attempt(number):
        torch.manual_seed(0)
        strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
        with strategy.scope():
            model = nn.Linear(2, 2)

        def step():
            model(torch.ones(2, 2)).sum().backward()
            torchstrategy.get_replica_context().all_reduce("sum", torch.ones(()))

        strategy.run(step)
        data = [p.detach().clone() for p in model.parameters()]
        before = [p.grad.clone() for p in model.parameters()]
        seen, where, moments = 0, None, []

        def profile(frame, event, argument):
            # Python runs a signal's handler when it enters a function of its own, and when it returns from one of C.
            # In a generator that is closed early, as any() does, and in what the collector calls, what a handler
            # raises is lost: we cannot help that.
            nonlocal seen, where
            code = frame.f_code
            if not code.co_filename.startswith(PACKAGE) or code.co_name in LOST or frame.f_back.f_code.co_name in LOST:
                return
            if event not in ("call", "c_return"):
                return
            # Before 3.11, what a profiler raises where a generator goes on ends it without its `finally`. What a
            # signal's handler raises does not.
            if sys.version_info < (3, 11) and event == "call" and frame.f_lasti >= 0:
                return
            seen += 1
            if number is None or seen == number:
                what = f"after {argument.__name__}()" if event == "c_return" else "on entry"
                where = f"{os.path.basename(code.co_filename)}, {code.co_name}, {what}"
                moments.append((frame.f_lineno, where))
            if seen == number:
                sys.setprofile(None)
                raise KeyboardInterrupt

        found = []
        signal.setitimer(signal.ITIMER_REAL, 5, 0.5)
        try:
            sys.setprofile(profile)
            strategy.run(step)
            sys.setprofile(None)
            found.append(("run", "it returned"))
        except KeyboardInterrupt:
            pass
        except BaseException as error:
            found.append(("run", repr(error)))
        finally:
            sys.setprofile(None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if number is None:
            return moments, []
        if not all(map(torch.equal, model.parameters(), data)):
            found.append(("state", "the parameters changed"))
        after = [torch.tensor(torch.nan) if p.grad is None else p.grad for p in model.parameters()]
        complete = [2 * gradient for gradient in before]
        if not all(map(torch.equal, after, before)) and not all(map(torch.equal, after, complete)):
            found.append(("state", f"the gradients were {before} and are {after}"))
        if type(model) is not nn.Linear:
            found.append(("traces", "the model is still of another class"))
        if len(hooks) != 1:  # the one that stays, for all strategies and runs
            found.append(("traces", "a hook is left in torch.optim"))
            hooks.popitem()
        if torchstrategy.get_replica_context() is None:
            found.append(("traces", "still in the cross-replica context"))
        signal.setitimer(signal.ITIMER_REAL, 5, 0.5)
        try:
            result = strategy.experimental_local_results(strategy.run(lambda: 1000 * 1000))
            if set(result) != {1000000}:
                found.append(("next run", f"it returned {result}"))
        except BaseException as error:
            found.append(("next run", repr(error)))
        signal.setitimer(signal.ITIMER_REAL, 0)
        found += [("threads", how) for how in dead]
        dead.clear()
        return where, found

    moments, _ = attempt(None)
    again, report = {}, []
    for number, moment in enumerate(moments, start=1):
        again[moment] = again.get(moment, 0) + 1
        if again[moment] > 2:
            continue  # in a loop over replicas or parameters
        where, found = attempt(number)
        report += [(kind, f"{number}. {where}: {what}") for kind, what in found]
    print(json.dumps([len(moments), report]))
"""  # noqa: E501


@needs_signals
@for_releases
@pytest.mark.slow
def test_ctrl_c_may_arrive_anywhere() -> None:
    # run: it comes out of `run`. next run: that one works. state: it is that from
    # before or from after the run.
    # traces: nothing of ours stays in the user's objects or in torch. threads: none of
    # ours dies aloud.
    done = run_program(EVERYWHERE)
    assert done.returncode == 0, done.stderr
    number, broken = json.loads(done.stdout)
    assert number > 100
    assert not broken, "\n".join(f"{kind}: {what}" for kind, what in broken)


# Fork


FORK = """
    import json, os, signal, sys
    import torch, torchstrategy

    strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        def step():
            optimizer.zero_grad()
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
            return torchstrategy.get_replica_context().all_reduce("sum", torch.ones(()))

        assert strategy.reduce("sum", strategy.run(step), axis=None) == 4

    class Hang(BaseException):
        pass

    def ring(*_):
        raise Hang

    def in_child(fn):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, 15, 0.5)
            try:
                fn()
                os._exit(0)
            except Hang:
                os._exit(2)
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
        return outcome(child)

    def outcome(child):
        return {0: "it ended", 2: "it hung"}.get(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "it raised")

    outcomes = {}
    train()
    outcomes["between runs"] = in_child(train)
    train()

    def merged(strategy):
        outcomes["in a merge function"] = in_child(train)

    def meets():
        return torchstrategy.get_replica_context().merge_call(merged)

    strategy.run(meets)
    train()

    parent = os.getpid()

    def forks(strategy):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, 15, 0.5)
            return
        outcomes["and goes on with the run"] = outcome(child)

    try:
        strategy.run(lambda: torchstrategy.get_replica_context().merge_call(forks))
    except RuntimeError:
        pass
    except Hang:
        os._exit(2)
    if os.getpid() != parent:
        os._exit(0)
    train()
    print(json.dumps(outcomes))
"""  # noqa: E501


@for_changes
@needs_fork
@pytest.mark.slow
def test_a_forked_child_can_run_and_does_not_hang() -> None:
    """It was forked between runs, and in a merge function.

    There it may also go on with the run.
    """
    done = run_program(FORK)
    assert done.returncode == 0, done.stderr
    whens = ("between runs", "in a merge function", "and goes on with the run")
    assert json.loads(done.stdout) == dict.fromkeys(whens, "it ended")


FORK_IN_A_REPLICA = """
import os, sys, torch, torchstrategy

strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
with strategy.scope():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def meets():
    torchstrategy.get_replica_context().all_reduce("sum", torch.ones(()))

def reads():
    model.weight.grad

def steps():
    optimizer.step()

def catches():
    try:
        meets()
    except RuntimeError as error:
        assert "forked in replica" in str(error) and "os._exit" in str(error)
        os._exit(5)

def leaves():
    os._exit(6)

statuses = []

def step(in_child):
    model(torch.ones(1, 2)).sum().backward()
    child = os.fork()
    if child == 0:
        return in_child()
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    optimizer.step()

ways = [meets, reads, steps, catches, leaves, lambda: None, lambda: sys.exit(7)]
for way in ways:
    strategy.run(step, args=(way,))
print(statuses[::2], statuses[1::2])
"""


@needs_fork
def test_a_child_forked_in_a_replica_waits_for_nobody() -> None:
    """It waited for ever at the next meeting, and at the end of the step.

    Its parent waited for it.
    """
    done = run_program(FORK_IN_A_REPLICA)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "[1, 1, 1, 5, 6, 1, 7] [1, 1, 1, 5, 6, 1, 7]"
    assert "the threads of the other replicas" in done.stderr


# The interpreter's exit


EXITS: dict[str, str] = {
    "with live strategies": """
        import atexit, torch, torchstrategy

        class Cycle:
            pass

        cycle = Cycle()
        cycle.itself = cycle
        cycle.strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
        strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 3)
        with strategy.scope():
            model = torch.nn.Linear(2, 1)

        def step():
            model(torch.ones(1, 2)).sum().backward()

        strategy.run(step)
        cycle.strategy.run(lambda: torchstrategy.get_replica_context().all_reduce("sum", torch.ones(())))

        def fails():
            raise ValueError

        try:
            strategy.run(fails)
        except ValueError:
            pass
        atexit.register(lambda: strategy.run(step))
    """,  # noqa: E501
    "while a daemon thread's run waits": """
        import threading, torch, torchstrategy

        strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
        under_way = threading.Event()

        def step():
            context = torchstrategy.get_replica_context()
            if context.replica_id_in_sync_group == 1:
                under_way.set()
                threading.Event().wait()
            context.all_reduce("sum", torch.ones(()))

        threading.Thread(target=strategy.run, args=(step,), daemon=True).start()
        assert under_way.wait(30)
    """,
    "while a daemon thread's run computes": """
        import threading, torch, torchstrategy

        strategy = torchstrategy.CentralStorageStrategy(["cpu"] * 2)
        under_way = threading.Event()

        def step():
            context = torchstrategy.get_replica_context()
            if context.replica_id_in_sync_group == 1:
                under_way.set()
                while True:
                    pass
            context.all_reduce("sum", torch.ones(()))

        threading.Thread(target=strategy.run, args=(step,), daemon=True).start()
        assert under_way.wait(30)
    """,
}


@for_changes
@pytest.mark.slow
@pytest.mark.parametrize("program", EXITS.values(), ids=EXITS)
def test_the_interpreter_exits_without_a_word(program: str) -> None:
    done = run_program(program)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
