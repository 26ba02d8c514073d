"""The vocabulary: names of the tensors of a transformer block that models tag and policies use.

A model tags a value with `jax.ad_checkpoint.checkpoint_name(x, names.CONTEXT)`; a policy says which names
are kept for backward, moved to the host, or neither. Where MaxText has a name for a tensor, it is the same
string here, so that its models and presets work without a change.

Two rules for tagging, both checked in the tests:
- tag the *input* of a nonlinearity, not its output: the derivative needs the input, and from the output it
  cannot be had without running the matmul before it again;
- tag what the block computes from the tag on, that is `x = checkpoint_name(x, ...)`: a tag whose result is
  dropped does nothing.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorName:
    """One entry of the vocabulary. `size` is the tensor's shape in the letters of the legend below.

    B batch, T sequence, D model width, H query heads, K key/value heads, C head width (H·C = D in the
    reference models), F MLP width.
    """

    name: str
    size: str
    meaning: str


BLOCK_INPUT = "decoder_layer_input"
ATTENTION_NORM = "attention_norm"
QUERY = "query_proj"
KEY = "key_proj"
VALUE = "value_proj"
KEY_VALUE = "kv_proj"
QUERY_KEY_VALUE = "qkv_proj"
SCORES = "attention_scores"
PROBABILITIES = "attention_probabilities"
CONTEXT = "context"
OUT = "out_proj"
MLP_NORM = "mlp_norm"
MLP_UP = "mlpwi"
MLP_GATE = "mlpwi_0"
MLP_GATED_UP = "mlpwi_1"
MLP_HIDDEN = "mlp_hidden"
MLP_DOWN = "mlpwo"
WEIGHTS = "gathered_weights"

VOCABULARY: tuple[TensorName, ...] = (
    TensorName(BLOCK_INPUT, "BTD", "the block's input, the residual stream"),
    TensorName(ATTENTION_NORM, "BTD", "output of the normalization before attention"),
    TensorName(QUERY, "BTHC", "queries, after bias and rotary embedding"),
    TensorName(KEY, "BTKC", "keys, after bias and rotary embedding"),
    TensorName(VALUE, "BTKC", "values"),
    TensorName(KEY_VALUE, "BT(2K)C", "keys and values where one matmul makes both"),
    TensorName(QUERY_KEY_VALUE, "BT(3H)C", "queries, keys and values where one matmul makes all three"),
    TensorName(SCORES, "BHTT", "attention scores before the softmax (naive attention only)"),
    TensorName(PROBABILITIES, "BHTT", "attention weights after softmax and dropout (naive attention only)"),
    TensorName(CONTEXT, "BTHC", "attention's output before the output projection"),
    TensorName(OUT, "BTD", "output projection of attention, before dropout and the residual sum"),
    TensorName(MLP_NORM, "BTD", "output of the normalization before the MLP"),
    TensorName(MLP_UP, "BTF", "first MLP matmul, before the nonlinearity (plain MLP)"),
    TensorName(MLP_GATE, "BTF", "gate matmul, before the nonlinearity (gated MLP)"),
    TensorName(MLP_GATED_UP, "BTF", "up matmul (gated MLP)"),
    TensorName(MLP_HIDDEN, "BTF", "input of the last MLP matmul, after the nonlinearity"),
    TensorName(MLP_DOWN, "BTD", "last MLP matmul, before dropout and the residual sum"),
    TensorName(WEIGHTS, "", "a parameter as it is used, gathered from its parts; only on a mesh that cuts parameters"),
)
