"""Lints over ranks: mistakes that raise no error, and give wrong numbers, seen while a program runs.

torch_internals  the private names of torch that this needs
places           lines of the program, and comments there that silence a lint
findings         what lints have found
pieces           memory of which a fact is known, and what is computed from it
asking           questions to objects of the program, which may refuse to be asked
objects          what is known of objects of the program while they are there
nodes            nodes of autograd's graphs
known            what is known of tensors while their memory is there
fingerprints     what is kept of a tensor
losses           of what a loss is made
contents         what a data set holds
modules          the modules that there are, and what they have
scheduled        schedulers of learning rates, and where they are stepped
causes           why copies have parted
multiplied_apart  gradients that ranks have alike, and multiply by numbers that differ
facts            what each rank has done since its last step
lint             what every lint is told
failures         lints that end with an error of their own
counted_again    batch norm that counts a batch again in a part that is computed again
thrown_replicas  what a module writes on itself where replicas of it are thrown away
kept_buffers     buffers that a program leaves out when it broadcasts the parameters of a model
left_out         gradients that a program leaves out when it reduces those of other parameters
old_copies       copies of parameters that were made before the last steps, and with which losses are computed
own_steps        steps that a program makes itself, without an optimizer of torch
tracks           parameters at the same position of an optimizer in several ranks
copies           copies of tensors that ranks have to keep alike
replicas         weights that differ between ranks
rows             rows that several ranks get, or none
orders           orders of rows, one for all ranks or another one on each
fed_rows         rows that a program cuts into batches itself, and that ranks have in common
streams          data sets without numbers of rows (`IterableDataset`) that give all ranks the same rows
batch_norm       batch norm with the statistics of one rank
frozen_norms     batch norm of a frozen part that is in training mode
frozen_updates   parameters that are frozen, and that their optimizer goes on changing
averages         averages that lack the statistics of batch norm
scales           losses that are divided too often or not at all
means            means of means over different numbers
gathered         tensors that lose their gradients when they are gathered
waits            tensors that are used before the program has waited for them
files            files that one rank writes and another reads, in no order
generators       random numbers that are alike on ranks
noise            random numbers that all ranks put together with rows that differ
clipping         gradients that are clipped while they are scaled
constants        the whole numbers that a function of the program knows
worker_generators  generators of a data set of which each worker of a loader has a copy
group_settings   settings of groups of parameters that are overwritten with one value
dropped          results that are computed from parameters or gradients and thrown away
messages         gradients that come back for the output of another micro-batch
metrics          metrics of schedulers that differ between ranks
captured_rates   learning rates of steps that a CUDA graph has captured
horizons         schedules as long as the batches of all ranks
shards           parts of gradients that ranks scale apart
orphans          optimizers whose parameters nobody trains
process_groups   process groups that ranks make with other members
biases           biases that count once for each rank
positives        targets among gathered rows that are those of another rank
schedulers       schedules that count micro-batches
zeroed           gradients that are set to zero before anything has read them
modes            models that are trained in evaluation mode after an evaluation
unreduced        steps while gradients of sharded parameters wait to be reduced
aliases          averages of weights that share their memory
opponents        gradients that are left from the step of an opponent
divided          parameters that all ranks have whole, in a model that they divide
unsharded        parameters beside those of `fully_shard`
scaled_steps     steps with gradients that are multiplied by the scale of mixed precision
clipped_alone    gradients that each rank clips before they are reduced
undone_modes     frozen parts whose evaluation mode is undone
sharded_apart    parameters that ranks shard from other weights
unscaled_sums    scaled gradients that are added to unscaled ones
mixed_scales     gradients of losses that have different scales of mixed precision
ties             parameters that share their memory
lost_ties        parameters that shared their memory until their module was moved
roundings        weights in bfloat16 that their updates do not change
replaced_optimizers  schedulers whose optimizer makes no steps
checkpoints      checkpoints that a program loads, and what takes its values from them
moved_moments    states of an optimizer that are loaded for other parameters
kept_states      states that a program keeps, and whose memory is that of the module
resumes          training that goes on from a checkpoint with an optimizer that has forgotten what it knew
repeated_epochs  samplers that begin again with epochs that were trained before a checkpoint
padding          rows of an evaluation that count twice
totals           totals that ranks add up again, with what they have added up before
outputs          collectives that write on one tensor what several ranks give
unmatched_names  checkpoints of other names than those of the model that loads them
gradient_hooks   hooks of gradients whose result is no mean over ranks
untrained_copies  models that ranks train together, and copies of them that nobody trains
unlike_models    models that all ranks call without gradients, and that differ
one_sided        rows that are gathered for a loss, and get no gradient from other ranks
gathered_orders  rows that are gathered in another order than what they are compared with
recomputed       dropout that drops other values when a part is computed again
divided_rows     rows that differ between ranks which divide a model
session          one run of a program
watching         a block in which lints watch a program
lint_training    lints for tests
"""

from torchstrategy.testing._lints.findings import Finding
from torchstrategy.testing._lints.lint_training import TrainingRecord, lint_training
from torchstrategy.testing._lints.watching import Watch

__all__ = ["Finding", "TrainingRecord", "Watch", "lint_training"]
