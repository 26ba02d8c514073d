"""`enable_remat` and `disable_remat`: one switch for a model that nobody wants to edit."""

from typing import cast

from flax import linen as nn
from flax import nnx

from remat_kit._enable import functions, linen, objects
from remat_kit._enable.where import Where, checked
from remat_kit._errors import PolicyError
from remat_kit._policy import Checkpoint, Policy, Region, get_policy


def enable_remat[Model](model: Model, policy: str | Policy | Checkpoint = "full", where: Where = None) -> Model:
    """`model` with some of its modules rematerialized under `policy`, without an edit to its code.

    An NNX model is changed in place (the class of the modules that are meant becomes a subclass of the same name) and
    returned. Of a Linen model a copy is returned, whose `apply` and `__call__` rematerialize. Of a function, a loss, a
    forward pass or a whole training step, another function is returned. So `model = enable_remat(model, ...)` and
    `model = disable_remat(model)` serve all three. Parameters with their paths and initial values, mutable state,
    random streams, results and gradients stay what they are.

    `where` says which modules: a class, the name of one, a glob of names or of module paths (`layers.*`,
    `encoder/layer_*`, `transformer.h[*]`), or a list of these. Only the outermost of modules inside one another are
    rematerialized. In a function it is the name of a name scope or of a jitted function, or a glob of scopes' paths,
    which Linen writes as module paths (`Transformer/block_0`) and which are written for NNX while it is traced. None
    finds the modules, or operations, that repeat and hold most of the parameters, or matrix products.

    A module that rematerializes itself as a whole is refused. In a function the checkpoints inside of a block are
    replaced by this one. Under policy `none` the model comes back as it is.

    Raises RematKitError when nothing fits `where`, with what there is; of a Linen model and a function that is known
    when it first runs. Raises PolicyError when `policy` is none, when `model` is a class, or when it is enabled.
    """
    chosen = policy if isinstance(policy, Checkpoint) and not isinstance(policy, str | Policy) else get_policy(policy)
    meant = checked(where)
    if isinstance(model, type):
        raise PolicyError(
            f"enable_remat got the class {model.__name__}. Give it a model, e.g. {model.__name__}(...); a class is "
            "rematerialized by remat_kit.remat."
        )
    if not isinstance(model, nnx.Module) and not callable(model):
        raise PolicyError(f"enable_remat got {model!r}. Give an NNX module, a Linen module or a function.")
    if isinstance(chosen, Policy) and chosen.region is Region.NOTHING:
        return model
    if isinstance(model, nnx.Module):
        objects.enable(model, chosen, meant)
        return cast(Model, model)
    enabled = (
        linen.enable(model, chosen, meant) if isinstance(model, nn.Module) else functions.enable(model, chosen, meant)
    )
    return cast(Model, enabled)


def disable_remat[Model](model: Model) -> Model:
    """`model` as it was before `enable_remat`: an NNX model itself, else the model or function that was given.

    One that is not enabled comes back as it is.
    """
    if isinstance(model, nnx.Module):
        objects.disable(model)
        return model
    before = linen.disable(model) if isinstance(model, nn.Module) else functions.disable(model)
    return cast(Model, model if before is None else before)
