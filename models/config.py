"""The configuration of a reference transformer, the table of named sizes, and checks that every model shares."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from remat_kit import RematKitError

STYLES = ("gpt", "llama")
ATTENTIONS = ("naive", "fused")
STACKS = ("scan", "unroll")
OPTIMIZERS = ("adamw", "sgd")
PLATFORMS = ("cpu", "cuda")
DTYPES = ("bfloat16", "float16", "float32", "float64")


class ConfigError(RematKitError):
    """A size or an option of a reference model that does not exist, or that does not go with another one."""


@dataclass(frozen=True)
class TransformerConfig:
    """A transformer, the shape of its batch, and how it is written down for XLA.

    Attributes:
      style: "gpt" (LayerNorm, biases, GELU, learned positions) or "llama" (RMSNorm, no biases, SwiGLU,
        rotary embedding).
      layers: number of blocks.
      width: of the residual stream; `width = heads * head_width`.
      heads: query heads.
      kv_heads: key/value heads; fewer than `heads` is grouped-query attention.
      mlp_width: of the hidden layer of the MLP.
      vocabulary: number of tokens.
      seq: tokens in a sequence; in style "gpt" also the number of learned positions.
      batch: sequences in a step.
      dropout: rate after the embedding and on both branches of a block.
      attention_dropout: rate on the attention probabilities; 0 with fused attention, whose kernels in JAX
        have no dropout.
      attention: "naive" (scores are a tensor of the program) or "fused" (`jax.nn.dot_product_attention`).
      stack: "scan" (one traced block, parameters stacked along a leading axis of layers) or "unroll".
      tied: whether the logits use the embedding table.
      rotary_base: wavelength base of the rotary embedding (style "llama").
      causal: whether a position sees none that come later, as in a decoder; an encoder's sees all.
      compute_dtype: of activations, and of parameters where they are used.
      param_dtype: of the parameters that the optimizer updates, and of its moments.
      optimizer: "adamw" or "sgd" (no state per parameter).
      platform: "cpu" or "cuda": which kernel fused attention is ("xla" or "cudnn").
      sequence_parallel: on a mesh with the axis tensor, cut the activations between the tensor-parallel products along
        the sequence.
      flat_masks: dropout's masks are drawn with their last two axes as one: the same masks, but XLA makes them in one
        kernel where backward makes them again.
    """

    style: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp_width: int
    vocabulary: int
    seq: int
    batch: int
    dropout: float = 0.0
    attention_dropout: float = 0.0
    attention: str = "naive"
    stack: str = "scan"
    tied: bool = True
    rotary_base: float = 10_000.0
    causal: bool = True
    compute_dtype: str = "bfloat16"
    param_dtype: str = "float32"
    optimizer: str = "adamw"
    platform: str = "cpu"
    sequence_parallel: bool = False
    flat_masks: bool = False

    def __post_init__(self) -> None:
        check_word("style", self.style, STYLES)
        check_word("attention", self.attention, ATTENTIONS)
        check_word("stack", self.stack, STACKS)
        check_word("compute_dtype", self.compute_dtype, DTYPES)
        check_word("param_dtype", self.param_dtype, DTYPES)
        check_word("optimizer", self.optimizer, OPTIMIZERS)
        check_word("platform", self.platform, PLATFORMS)
        for name in ("layers", "width", "heads", "kv_heads", "mlp_width", "vocabulary", "seq", "batch"):
            check_whole(name, getattr(self, name))
        for name in ("dropout", "attention_dropout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                raise ConfigError(f"{name} is {value!r}. It must be at least 0 and below 1: give 0 to switch it off.")
        for name in ("sequence_parallel", "flat_masks"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}. Give true or false.")
        self._check_heads()
        if self.attention == "fused":
            self._check_fused()

    def _check_heads(self) -> None:
        if self.width % self.heads:
            raise ConfigError(
                f"width {self.width} is not a multiple of heads {self.heads}. Every head has the same width: "
                f"change one of them, e.g. width={self.heads * -(-self.width // self.heads)}."
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}. Every key/value head serves "
                f"the same number of query heads: change one of them, e.g. kv_heads={self.heads}."
            )
        if self.style == "llama" and self.head_width % 2:
            raise ConfigError(
                f"a head is {self.head_width} wide (width {self.width} / heads {self.heads}). The rotary embedding "
                f"turns pairs: choose an even head width, e.g. width={self.heads * (self.head_width + 1)}."
            )

    def _check_fused(self) -> None:
        if self.attention_dropout:
            raise ConfigError(
                f"attention_dropout is {self.attention_dropout} with fused attention, whose kernels in JAX have no "
                "dropout. Give attention_dropout=0 (dropout on the block's branches stays), or attention=naive."
            )
        if self.platform == "cuda" and self.compute_dtype not in ("bfloat16", "float16"):
            raise ConfigError(
                f"compute_dtype is {self.compute_dtype} with fused attention on cuda. The cuDNN kernel takes "
                "bfloat16 and float16 only: give one of these, or attention=naive."
            )
        if self.platform == "cuda" and self.head_width % 8:
            raise ConfigError(
                f"a head is {self.head_width} wide (width {self.width} / heads {self.heads}). The cuDNN kernel takes "
                "multiples of 8: change width or heads, or give attention=naive."
            )

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads


def _gpt(layers: int, width: int, heads: int, vocabulary: int, seq: int, batch: int) -> Mapping[str, Any]:
    return {"layers": layers, "width": width, "heads": heads, "vocabulary": vocabulary, "seq": seq, "batch": batch}


def _llama(
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    mlp_width: int,
    vocabulary: int,
    *,
    seq: int,
    batch: int,
    tied: bool = False,
    rotary_base: float = 10_000.0,
) -> Mapping[str, Any]:
    return {
        **_gpt(layers, width, heads, vocabulary, seq, batch),
        "kv_heads": kv_heads,
        "mlp_width": mlp_width,
        "tied": tied,
        "rotary_base": rotary_base,
    }


SIZES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "gpt": {
        "tiny": _gpt(2, 64, 4, 256, 32, 2),
        # GPT-2 (Radford et al. 2019).
        "gpt2-small": _gpt(12, 768, 12, 50257, 1024, 8),
        "gpt2-medium": _gpt(24, 1024, 16, 50257, 1024, 8),
        "gpt2-large": _gpt(36, 1280, 20, 50257, 1024, 8),
        "gpt2-xl": _gpt(48, 1600, 25, 50257, 1024, 8),
        # Korthikanti et al. 2022, table 3; the batch is the paper's micro batch.
        "22b": _gpt(48, 6144, 64, 51200, 2048, 4),
        "175b": _gpt(96, 12288, 96, 51200, 2048, 1),
        "530b": _gpt(105, 20480, 128, 51200, 2048, 1),
        "1t": _gpt(128, 25600, 160, 51200, 2048, 1),
    },
    "llama": {
        "tiny": _llama(2, 64, 4, 2, 128, 256, seq=32, batch=2),
        "llama-1b": _llama(16, 2048, 32, 8, 8192, 128256, seq=8192, batch=1, tied=True, rotary_base=500_000.0),
        "llama-7b": _llama(32, 4096, 32, 32, 11008, 32000, seq=4096, batch=1),
        "llama3-8b": _llama(32, 4096, 32, 8, 14336, 128256, seq=8192, batch=1, rotary_base=500_000.0),
        "llama-70b": _llama(80, 8192, 64, 8, 28672, 32000, seq=4096, batch=1),
    },
}
"""Named sizes by style. A value that a size does not give follows from the others, see `configure`."""

DEFAULT_DROPOUT: Mapping[str, float] = {"gpt": 0.1, "llama": 0.0}
"""Rate by style, of GPT-2 and of Llama's pretraining."""


def configure(style: str, size: str, **overrides: Any) -> TransformerConfig:
    """The configuration of a named size with some values changed; an override of None changes nothing.

    What neither the size nor an override gives follows from what they give: `kv_heads = heads`,
    `mlp_width = 4 * width`, `dropout` of the style, and `attention_dropout` equal to `dropout` with naive
    attention and 0 with fused attention.

    Raises ConfigError for an unknown style, size or field, and for values that do not go together.
    """
    check_word("style", style, STYLES)
    check_word("size", size, SIZES[style], what=f"a size of style {style}")
    fields = {field.name for field in dataclasses.fields(TransformerConfig)} - {"style"}
    for name in overrides:
        check_word("option", name, fields, what="an option of TransformerConfig")
    chosen: dict[str, Any] = {**SIZES[style][size]}
    return complete(style, chosen | given(overrides))


def complete(style: str, chosen: Mapping[str, Any]) -> TransformerConfig:
    """The configuration with the values of `chosen`, where what it leaves open follows as `configure` says."""
    chosen = dict(chosen)
    chosen.setdefault("kv_heads", chosen["heads"])
    chosen.setdefault("mlp_width", 4 * chosen["width"])
    chosen.setdefault("dropout", DEFAULT_DROPOUT[style])
    chosen.setdefault("attention_dropout", chosen["dropout"] if chosen.get("attention") != "fused" else 0.0)
    return TransformerConfig(style=style, **chosen)


def given(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`overrides` without those that are None and change nothing."""
    return {name: value for name, value in overrides.items() if value is not None}


def check_whole(name: str, value: Any) -> None:
    """Raises ConfigError unless `value` is a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}. It must be a whole number of at least 1: give e.g. {name}=8.")


def check_word(name: str, got: Any, allowed: Iterable[str], what: str | None = None) -> None:
    """Raises ConfigError unless `got` is one of `allowed`."""
    if got in allowed:
        return
    words = sorted(allowed) if isinstance(allowed, set) else list(allowed)
    close = difflib.get_close_matches(str(got), words, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"{name} {got!r} is not {what or 'known'}.{hint} Allowed: {', '.join(words)}.")
