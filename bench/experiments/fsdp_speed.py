"""FSDP2 with and without Gradwire over slow links: steps of a sharded transformer, and reduce-scatter alone.

4 hosts at 1 Gb/s, 10 minutes, PyTorch 2.9 or later. The model has GPT-2's blocks and few tokens:
communication takes most of a step, as with fast GPUs on such links.
"""
from harness import report

NATIVE_FP32, NATIVE_BF16 = "PyTorch, fp32", "PyTorch, reduce_dtype=bf16"
BF16_SUMS = {"native": {"reduce_dtype": "bfloat16"}}
MODES = {NATIVE_FP32: {"native": {}}, NATIVE_BF16: BF16_SUMS,
         "PyTorch, param_dtype=reduce_dtype=bf16": {"native": {"param_dtype": "bfloat16",
                                                               "reduce_dtype": "bfloat16"}},
         **{f"{gradients} / {weights}": {"ours": {"gradients": gradients, "weights": weights}}
            for gradients, weights in (("fp32", "fp32"), ("bf16", "bf16"), ("int8", "bf16"),
                                       ("int8", "int8"), ("int4:rotate=hadamard", "int8"))}}
SCATTER_SPECS = ("fp32", "bf16", "int8", "int4", "int4:rotate=hadamard")
SCATTER_MODES = {NATIVE_FP32: {"native": True},
                 **{spec: {"ours": f"{spec}{',' if ':' in spec else ':'}schedule=two_shot"}
                    for spec in SCATTER_SPECS}}
SPECS = SCATTER_SPECS
MODULES = ("torch>=2.9", "torch.distributed.fsdp._fully_shard")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GRADWIRE_THREADS": "1"}
OPTIONS = {"ranks": 4, "rate": "1gbit", "steps": 4, "warm_up": 1, "repetitions": 3}
SMOKE = {"ranks": 2, "rate": "", "steps": 1, "repetitions": 1}


def measure(options):
    from harness import pytorch_training
    return pytorch_training.steps(options, "fsdp", MODES, SCATTER_MODES, 6_400_000)


line = report.speed_line


def tables(document):
    steps, scatter = ([i for i in document["items"] if i["what"] == what]
                      for what in ("step", "reduce_scatter"))
    return (report.markdown(report.speed_table(steps, NATIVE_FP32, NATIVE_BF16, first="gradients / weights"))
            + "\n" + report.markdown(report.speed_table(scatter, "fp32", first="reduce-scatter of 25.6 MB")))
