"""Loss after training with DDP, for PyTorch's hooks and for Gradwire's, with SGD and AdamW."""
import fsdp_loss
from ddp_speed import BF16_HOOK, POWERSGD
from fsdp_loss import ENVIRONMENT, MODULES, NATIVE_FP32, OPTIONS, SMOKE  # noqa: F401
from harness import report

SPECS = ("bf16", "int8", "int4", "int4:rotate=hadamard",
         *(f"powersgd:rank=4,start={start}" for start in (0, 2, 5, 20)))
MODES = {NATIVE_FP32: {"native": {}}, **BF16_HOOK,
         **{f"PyTorch, powerSGD_hook, rank 4, start {start}": {"native": {**POWERSGD, "start": start}}
            for start in (2, 20)},
         **{spec: {"ours": {"spec": spec}} for spec in SPECS}}
# AdamW's learning rate is the best rate for FP32 in the range from 0.001 to 0.008.
OPTIMIZERS = {**fsdp_loss.OPTIMIZERS, "adamw": {"lr": 0.002}}
line = report.loss_line


def measure(options):
    from harness import pytorch_training
    return pytorch_training.losses(options, "ddp", MODES, OPTIMIZERS)


def tables(document):
    return report.markdown(report.loss_table(document["items"], NATIVE_FP32))
