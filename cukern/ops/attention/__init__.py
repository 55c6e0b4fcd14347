"""attention: fused, or with scores in memory."""

from cukern.ops.attention import cases as cases
from cukern.ops.attention.op import attention as attention
from cukern.ops.attention.op import attention_packed as attention_packed
from cukern.ops.attention.op import attention_varlen as attention_varlen
