"""The examples of docs/for-framework-authors.md: one C program of all of them, on 4 ranks."""
from __future__ import annotations

import os
import pathlib
import subprocess
import tempfile
from typing import List

from launch import free_port
from page_sessions import Session

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORLD = 4

# What the page's examples leave to their reader; %s: an example.
PROGRAM = """
#include "gradwire.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static void fail(const char* status, const char* text) {
  fprintf(stderr, "%%s: %%s\\n", status, text);
  exit(1);
}

static void expect(gw_comm comm, const float* values, int64_t count, float expected, const char* what) {
  if (gw_comm_check(comm) != GW_OK) fail(what, gw_last_error());
  for (int64_t k = 0; k < count; ++k)
    if (fabsf(values[k] - expected) > 0.02f) {
      fprintf(stderr, "%%s: element %%ld is %%f, not %%f\\n", what, (long)k, values[k], expected);
      exit(1);
    }
}

static void fill(float* values, int64_t count, float value) {
  for (int64_t k = 0; k < count; ++k) values[k] = value;
}

static int loaded;
static void load_next_batch(void) { ++loaded; }
static void report_slow_step(void) {}

static float gradients[256 * 512], grad[5433], residual[5433], weights[5433], shard[4096], master[4096];

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const int rank = atoi(argv[1]), world = 4;
  const float mean = 2.5f;
  const size_t offset = 0;
  void* const stream = NULL;
%s
  gw_tensor tensors[1];
  void* grads[1] = {gradients};
  gw_reducer reducer;
  const int i = 0, n = 1;
%s
  fill(gradients, 256 * 512, (float)rank + 1);
%s
  expect(comm, gradients, 256 * 512, mean, "gw_reducer_allreduce");
  fill(gradients, 256 * 512, (float)rank + 1);
%s
  expect(comm, gradients, 256 * 512, mean, "gw_reducer_wait");
  fill(gradients, 256 * 512, (float)rank + 1);
  int32_t done;
%s
  expect(comm, gradients, 256 * 512, mean, "gw_request_wait");
  if (loaded != 1) return 3;
  const int64_t count = 5433;
  fill(grad, count, (float)rank + 1);
%s
  expect(comm, grad, count, mean, "gw_allreduce");
  fill(grad, count, (float)rank + 1);
%s
  expect(comm, shard, counts[rank], mean, "gw_reduce_scatter");
  expect(comm, weights, count, 0, "gw_all_gather_update of zeros");
  gw_reducer_destroy(reducer);
  gw_comm_destroy(comm);
  return 0;
}
"""


def c_program(examples: List[str], build: str) -> None:
    source = PROGRAM % tuple(examples)
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        path, program = pathlib.Path(folder, "page.c"), pathlib.Path(folder, "page")
        path.write_text(source.replace("node0:29500", address))
        subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-Wall", "-Wextra", "-Werror", "-I", ROOT / "collectives", path,
                        "-o", program, "-L", f"{build}/lib", "-lgradwire", "-lm", f"-Wl,-rpath,{build}/lib"], check=True)
        ranks = [subprocess.Popen([program, str(rank)], env={**os.environ, "GRADWIRE_THREADS": "1"}) for rank in range(WORLD)]
        try:
            codes = [rank.wait(timeout=100) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert codes == [0] * WORLD, codes


SESSIONS = {"a C program of 4 ranks": Session(0, c_program, [
    "gw_comm comm;", "gw_tensor t", "gw_reducer_allreduce", "gw_reducer_ready", "gw_request request;", "gw_call_tag", "int64_t counts"])}
NOT_RUN = [("cmake --preset", "tests/capi/installed_test.py installs the library elsewhere, and builds and runs the example programs with it")]
