"""The names of `tf.nn` and `torch.nn` that mean something else among replicas.

These are losses and batch normalisation.

With these, a step on several replicas is exactly the step on one device, also if the
rows of a batch depend on each other.
"""

from torchstrategy._base.errors import explain_keywords as _explain_keywords
from torchstrategy.nn._losses import compute_average_loss, scale_regularization_loss
from torchstrategy.nn._sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm", "compute_average_loss", "scale_regularization_loss"]

for _name in __all__:
    globals()[_name].__module__ = __name__
_explain_keywords(globals(), __all__)
del _name
