"""The part of a training step that an operation belongs to, read from the name that JAX gave it.

JAX writes its transformations into the name stack of an equation, and from there into the `op_name` of an HLO
instruction. What `jax.grad` runs forward stands in `jvp(`, what it runs backward in `transpose(`; what a checkpointed
function runs again stands, within the latter, behind `rematted_computation`:

  jit(step)/jvp()/while/body/eval_jaxpr/dot_general                                          forward (scanned)
  jit(step)/transpose(jvp(jvp()))/checkpoint/dot_general                                     backward (unrolled)
  jit(step)/transpose(jvp())/while/body/eval_jaxpr/checkpoint/rematted_computation/mul       recompute
  jit(step)/sub                                                                              update
"""

FORWARD, BACKWARD, RECOMPUTE, UPDATE = "forward", "backward", "recompute", "update"


def phase_of(name: str) -> str:
    """ "forward", "backward", "recompute", or "update" for what is outside the differentiated part of a step."""
    if "rematted_computation" in name:
        return RECOMPUTE
    if "transpose(" in name:
        return BACKWARD
    return FORWARD if "jvp(" in name else UPDATE
