"""Uses the Python package, for sweeps over refused resources. Usage: program.py ADDRESS RANK"""
import ctypes
import hashlib
import sys

import gradwire
import numpy

tensors = [((numpy.arange(1 << 15) * 7 + i * 5) % 17 - 8).astype(numpy.float32).reshape(256, 128)
           for i in range(2)]
begin = getattr(ctypes.CDLL(None), "refuse_begin", None)
if begin is not None:
    begin()
try:
    with gradwire.Communicator(sys.argv[1], int(sys.argv[2]), 2, timeout_s=3) as comm:
        comm.allreduce_(tensors[0], "int8")
        reducer = gradwire.Reducer(comm, "powersgd:rank=2", [(f"t{i}", 256, 128) for i in range(2)])
        reducer.allreduce(tensors)
        reducer.load_state(reducer.save_state())
        reducer.allreduce(tensors)
        reducer.close()
    print(hashlib.sha256(b"".join(t.tobytes() for t in tensors)).hexdigest())
except Exception as error:  # reports any error
    sys.exit(f"gradwire: {type(error).__name__}: {error}")
