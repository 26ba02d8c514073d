"""How many bytes a step has alive at once, by its jaxpr in the order in which it is written.

A guess before anything is compiled: it grows with batch, sequence and layers as the program does, and is then scaled
to what XLA makes of it. XLA fuses elementwise work, reuses memory in place and orders the program otherwise, so by
itself the figure is right to a factor of about two.
"""

from jax.extend import core

from remat_kit._jaxpr import Jaxpr, bodies, nbytes


def live_bytes(jaxpr: Jaxpr) -> int:
    """The most bytes of values made by `jaxpr` that are alive at one equation, those inside calls and loops included.

    Its own inputs are not counted. A value lives from the equation that makes it to the last one that takes it; what
    a loop stacks is there, in full, while the loop runs. Bytes are those of whole arrays, however they are sharded.
    """
    while not isinstance(jaxpr, core.Jaxpr):
        jaxpr = jaxpr.jaxpr
    last_use = {id(var): place for place, eqn in enumerate(jaxpr.eqns) for var in eqn.invars}
    last_use |= {id(var): len(jaxpr.eqns) for var in jaxpr.outvars}
    ends: dict[int, list[int]] = {}
    live = most = 0
    for place, eqn in enumerate(jaxpr.eqns):
        made = sum(nbytes(var) for var in eqn.outvars)
        inside = max((live_bytes(body) for body, _ in bodies(eqn)), default=0)
        # A call makes its results inside; a loop stacks them beside what one turn works with.
        during = made + inside if eqn.primitive.name == "scan" else max(made, inside)
        most = max(most, live + during)
        for var in eqn.outvars:
            if (end := last_use.get(id(var), place)) > place:
                ends.setdefault(end, []).append(nbytes(var))
                live += nbytes(var)
        live -= sum(ends.pop(place, ()))
    return most
