"""Loss after training with FSDP2, for each format of the gradients, with error feedback and without."""
from fsdp_speed import BF16_SUMS, ENVIRONMENT, MODULES, NATIVE_BF16, NATIVE_FP32  # noqa: F401
from harness import report

SPECS = ("int8", "int4", "int4:rotate=hadamard", "int2")
MODES = {NATIVE_FP32: {"native": {}}, NATIVE_BF16: BF16_SUMS,
         **{f"{spec}{'' if residual == 'fp32' else ', residual=' + residual}":
            {"ours": {"gradients": spec, "weights": "fp32", "residual": residual}}
            for spec in SPECS for residual in ("fp32", "int8", "off")
            if (spec, residual) != ("int8", "int8")}}
# The learning rate is the best rate for FP32 in the range from 0.05 to 0.4.
OPTIMIZERS = {"sgd": {"lr": 0.05, "momentum": 0.9}}
OPTIONS = {"ranks": 2, "steps": 300, "seeds": 3}
SMOKE = {"ranks": 2, "rate": "", "steps": 1, "seeds": 1}


def measure(options):
    from harness import pytorch_training
    return pytorch_training.losses(options, "fsdp", MODES, OPTIMIZERS)


line = report.loss_line


def tables(document):
    return report.markdown(report.loss_table(document["items"], NATIVE_FP32))
