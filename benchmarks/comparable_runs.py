"""How `public_programs` starts a program whose numbers are to be compared.

The numbers are compared with those of another run of the same program.

A GPU has a generator of random numbers of its own, and so has a simulated device: what
a program draws there is not what it draws on the CPU. Here simulated devices draw from
the generator of the CPU, and torch, Python and NumPy are seeded before the program
begins: those that set no seed print other numbers in each run. Then all numbers are to
be equal, but for rounding, and the gradients of each step of an optimizer, too.
"""

# Before one of the others, for programs that load data otherwise on GPUs: they shuffle
# there alone, and with workers, in which Python draws numbers of its own.
LOADED_ALIKE = """
from torch.utils.data import DataLoader, RandomSampler

def make_without_workers(loader, *values, make=DataLoader.__init__, **options):
    make(loader, *values, **{**options, "num_workers": 0, "persistent_workers": False})

DataLoader.__init__ = make_without_workers
RandomSampler.__iter__ = lambda sampler: (i % len(sampler.data_source) for i in range(len(sampler)))
"""  # noqa: E501

_BOTH = """
import atexit, json, random, runpy, sys
import numpy, torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

random.seed(0)
numpy.random.seed(0)
torch.manual_seed(0)
notes, gradients = sys.argv.pop(1), []

def note_gradients(optimizer, *_):
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    squares = [float(weight.grad.detach().double().square().sum()) for weight in weights if weight.grad is not None]
    gradients.append(sum(squares) ** 0.5)

# Before the step: optimizers that work on lists, as on GPUs, may write on gradients.
register_optimizer_step_pre_hook(note_gradients)

@atexit.register
def write_notes():
    with open(notes, "w") as file:
        json.dump(gradients, file)
"""  # noqa: E501

# python -c ... NOTES OPTIONS: as `python -m torchstrategy.testing.run OPTIONS`. Writes
# the gradients' norms to NOTES.
ON_SIMULATED_DEVICES = f"""{_BOTH}
from torchstrategy.testing._simulation import generators

def make_default_generators(count, make=generators.make_default_generators):
    make(count)
    for generator in generators.default_generators():
        generator._inside.generator = torch.default_generator

generators.make_default_generators = make_default_generators
runpy.run_module("torchstrategy.testing.run", run_name="__main__", alter_sys=True)
"""

# python -c ... NOTES STEPS FILE ARGUMENTS: as `python FILE ARGUMENTS`, for a number of
# steps; 0: until it ends.
ON_THE_CPU = f"""{_BOTH}
most, file, steps = int(sys.argv.pop(1)), sys.argv[1], {{}}

def stop_after_the_last(optimizer, *_):
    steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1
    if steps[id(optimizer)] == most:
        raise SystemExit(0)

register_optimizer_step_post_hook(stop_after_the_last)
del sys.argv[0]
sys.path[0] = file.rpartition("/")[0] or "."
runpy.run_path(file, run_name="__main__")
"""
