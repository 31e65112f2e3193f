"""DDP with PyTorch's hooks and with Gradwire's over slow links: steps of fsdp_speed's transformer."""
from fsdp_speed import ENVIRONMENT, MODULES, NATIVE_FP32, OPTIONS, SMOKE  # noqa: F401
from harness import report

BF16_HOOK = {"PyTorch, bf16_compress_hook": {"native": {"hook": "bf16_compress_hook"}}}
POWERSGD = {"hook": "powerSGD_hook", "rank": 4, "start": 2}
SPECS = ("fp32", "bf16", "int8", "int4:rotate=hadamard", "powersgd:rank=4")
MODES = {NATIVE_FP32: {"native": {}}, **BF16_HOOK, "PyTorch, powerSGD_hook, rank 4": {"native": POWERSGD},
         **{spec: {"ours": {"spec": spec}} for spec in (*SPECS, "auto", "auto:error=1")}}
OPTIONS = {**OPTIONS, "warm_up": 3}


def measure(options):
    from harness import pytorch_training
    return pytorch_training.steps(options, "ddp", MODES)


line = report.speed_line


def tables(document):
    return report.markdown(report.speed_table(document["items"], NATIVE_FP32))
