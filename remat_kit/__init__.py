"""Rematerialization policies for JAX, and what each of them costs on a GPU that need not be there."""

from remat_kit import names as names
from remat_kit._errors import RematKitError as RematKitError
from remat_kit._policy import POLICIES as POLICIES
from remat_kit._policy import Policy as Policy
from remat_kit._policy import Region as Region
from remat_kit._policy import Rule as Rule
from remat_kit._policy import get_policy as get_policy
from remat_kit._policy import offload as offload
from remat_kit._policy import save as save
from remat_kit._policy import save_kernels as save_kernels
from remat_kit._policy import union as union
from remat_kit._step import Step as Step
from remat_kit._step import Workload as Workload
from remat_kit._wrap import remat as remat
