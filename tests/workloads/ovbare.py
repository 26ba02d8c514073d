import time, tempfile, jax
from remat_kit._policy import get_policy
from remat_kit._step import Workload
from remat_kit._target import get_target
from remat_kit._trace import device_mesh
from remat_kit._compile import CompileOptions
from jax.sharding import NamedSharding, PartitionSpec
def bare(arg):
    p,dump=arg
    a=time.process_time(); w=time.time()
    tgt=get_target("h100-sxm-80gb")
    step=Workload("models.transformer:gpt",(("layers",4),)).build(get_policy(p),"cuda")
    m=device_mesh(tgt)
    sh=NamedSharding(m,PartitionSpec())
    args=jax.tree.map(lambda l: jax.ShapeDtypeStruct(l.shape,l.dtype,sharding=sh),step.args)
    low=jax.jit(step.fn,donate_argnums=step.donate).trace(*args).lower()
    e=time.process_time()
    with tempfile.TemporaryDirectory() as d:
        o=CompileOptions().for_xla("cuda")
        if dump: o|={"xla_dump_to":d,"xla_dump_hlo_as_proto":True}
        low.compile(compiler_options=o)
        import os
        n=sum(f.stat().st_size for f in os.scandir(d)); k=sorted((f.stat().st_size,f.name) for f in os.scandir(d))[-6:]
    return f"{arg} pre {e-a:.2f} compile {time.process_time()-e:.2f} wall {time.time()-w:.2f} dump {n} {k}"
