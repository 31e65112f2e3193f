"""The examples of docs/for-nccl-users.md."""
from __future__ import annotations

SESSIONS: dict = {}
NOT_RUN = [
    ("LD_PRELOAD=", "needs GPUs; tests/nccl/interposer_test.py runs a program under the library, with a stand-in for NCCL"),
    ("gradwire: ncclAllReduce of at least", "what it says there, with GPUs"),
]
