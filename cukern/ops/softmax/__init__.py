"""softmax and log_softmax along any dimension. causal_softmax uses the other names."""

from cukern.ops.softmax import plan as plan
from cukern.ops.softmax import row_storage as row_storage
from cukern.ops.softmax.op import LEAST_SCALE as LEAST_SCALE
from cukern.ops.softmax.op import MOST_SCALE as MOST_SCALE
from cukern.ops.softmax.op import Versions as Versions
from cukern.ops.softmax.op import checked_scale as checked_scale
from cukern.ops.softmax.op import log_softmax as log_softmax
from cukern.ops.softmax.op import softmax as softmax
from cukern.ops.softmax.op import two_versions as two_versions
