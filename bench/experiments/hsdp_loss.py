"""Loss after training with FSDP2 on two replicas, for PowerSGD between the replicas."""
from fsdp_loss import ENVIRONMENT, MODULES, NATIVE_FP32, OPTIMIZERS, SMOKE, line, tables  # noqa: F401

SPECS = ("powersgd:rank=4", "powersgd:rank=4,wire=int8", "powersgd:rank=8")
MODES = {NATIVE_FP32: {"native": {}, "replicas": 2},
         **{spec: {"ours": {"gradients": "fp32", "weights": "fp32", "replicas": spec}, "replicas": 2}
            for spec in SPECS}}
OPTIONS = {"ranks": 4, "steps": 300, "seeds": 3}


def measure(options):
    from harness import pytorch_training
    return pytorch_training.losses(options, "fsdp", MODES, OPTIMIZERS)
