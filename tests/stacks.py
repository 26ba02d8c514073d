"""Small losses over a stack of two-matmul layers, scanned or unrolled, whose layers or whole are wrapped."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

Wrap = Callable[[Any], Any]


def layer(x: Any, w: Any) -> Any:
    """x [B, W] through w[0] [W, H] and w[1] [H, W]: (the new x, nothing), as a scan wants it."""
    hidden = checkpoint_name(jax.nn.gelu(checkpoint_name(x @ w[0], "up")), "hidden")
    return x + checkpoint_name(hidden @ w[1], "down"), None


def plain(f: Any) -> Any:
    return f


def scanned(wrap: Wrap, outer: Wrap = plain) -> Any:
    """loss(ws, x): ws[0] [L, W, H] and ws[1] [L, H, W] are scanned."""
    run = outer(lambda ws, x: jax.lax.scan(wrap(layer), x, ws)[0])
    return lambda ws, x: run(ws, x).sum()


def unrolled(wrap: Wrap, outer: Wrap = plain) -> Any:
    """loss(ws, x) like that of `scanned`, layer by layer."""

    def loss(ws: Any, x: Any) -> Any:
        for i in range(len(ws[0])):
            x, _ = wrap(layer)(x, jax.tree.map(lambda w, i=i: w[i], ws))
        return x.sum()

    return outer(loss)
