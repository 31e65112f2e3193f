"""The examples of docs/extending.md: a C program with all examples of the C ABI, on 4 ranks."""
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

# The program around the examples. Each %s is replaced by an example.
PROGRAM = """
#define _POSIX_C_SOURCE 200809L
#include <gradwire/gradwire.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

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

/* A store of files, in the folder `user`. */
static void name_of(char* path, size_t capacity, void* user, const char* key) {
  size_t at = (size_t)snprintf(path, capacity, "%%s/", (const char*)user);
  for (; *key && at + 1 < capacity; ++key) path[at++] = *key == '/' ? '_' : *key;
  path[at] = 0;
}
static const char* my_set(void* user, const char* key, const void* value, size_t bytes, int64_t timeout_ms) {
  (void)timeout_ms;
  char path[4096], scratch[4110];
  name_of(path, sizeof path, user, key);
  snprintf(scratch, sizeof scratch, "%%s.new", path);
  FILE* file = fopen(scratch, "wb");
  if (file == NULL) return "the folder is gone";
  fwrite(value, 1, bytes, file);
  fclose(file);
  return rename(scratch, path) == 0 ? NULL : "the folder is gone";
}
static const char* my_get(void* user, const char* key, int64_t timeout_ms, void* value, size_t capacity, size_t* bytes) {
  char path[4096];
  name_of(path, sizeof path, user, key);
  const struct timespec step = {0, 10 * 1000 * 1000};
  for (int64_t waited_ms = 0; waited_ms < timeout_ms; waited_ms += 10) {
    FILE* file = fopen(path, "rb");
    if (file != NULL) {
      *bytes = fread(value, 1, capacity, file);
      fclose(file);
      return NULL;
    }
    nanosleep(&step, NULL);
  }
  return NULL;
}

static float gradients[256 * 512], grad[5433], residual[5433], weights[5433], shard[4096], master[4096];

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  void* const my_client = argv[2];
  const int rank = atoi(argv[1]), world = 4;
  const float mean = 2.5f;
  const size_t offset = 0;
  void* const stream = NULL;
%s
  gw_comm_destroy(comm);
%s
  gw_tensor tensors[1];
  void* grads[1] = {gradients};
  gw_reducer reducer;
  const int i = 0, n = 1;
%s
  gw_reducer_destroy(reducer);
  fill(gradients, 256 * 512, (float)rank + 1);
%s
  expect(comm, gradients, 256 * 512, (float)rank + 1, "gw_choose, which changes no gradient,");
%s
  expect(comm, gradients, 256 * 512, mean, "gw_reducer_allreduce");
  fill(gradients, 256 * 512, (float)rank + 1);
%s
  expect(comm, gradients, 256 * 512, mean, "gw_reducer_wait");
  fill(gradients, 256 * 512, (float)rank + 1);
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

  /* Rank 0 dies between two steps; the others repeat the second. */
  char meeting[4200];
  snprintf(meeting, sizeof meeting, "file://%%s/meeting", argv[2]);
  options.store = NULL;
  options.rendezvous = meeting;
  options.shrinkable = 1;
  if (gw_comm_create(&options, &comm) != GW_OK || gw_reducer_create(comm, "int8", tensors, n, NULL, &reducer) != GW_OK)
    fail("shrinkable", gw_last_error());
  fill(gradients, 256 * 512, (float)rank + 1);
  if (gw_reducer_allreduce(reducer, grads, NULL, NULL) != GW_OK) fail("the first step", gw_last_error());
  /* Rank 0 must not end while another rank waits for its data of the first step. */
  char key[16], byte = 0;
  snprintf(key, sizeof key, "stepped%%d", rank);
  my_set(my_client, key, &byte, 1, 60000);
  for (int r = 1; rank == 0 && r < world; ++r) {
    size_t bytes = 0;
    snprintf(key, sizeof key, "stepped%%d", r);
    my_get(my_client, key, 60000, &byte, 1, &bytes);
  }
  if (rank == 0) _exit(0);
  fill(gradients, 256 * 512, (float)rank + 1);
%s
  expect(comm, gradients, 256 * 512, 3, "the step after gw_comm_shrink");
  gw_stats stats = {.size = sizeof stats};
  gw_reducer_stats(reducer, &stats);
  if (stats.steps != 2) fail("gw_reducer_state_load", "the count of steps is not restored");
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
        subprocess.run([
            os.environ.get("CC", "cc"), "-std=c11", "-Wall", "-Wextra", "-Werror", "-I", ROOT / "include",
            path, "-o", program, "-L", f"{build}/lib", "-lgradwire", "-lm", f"-Wl,-rpath,{build}/lib"
        ], check=True)
        ranks = [subprocess.Popen([program, str(rank), folder], env={**os.environ, "GRADWIRE_THREADS": "1"})
                 for rank in range(WORLD)]
        try:
            codes = [rank.wait(timeout=100) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert codes == [0] * WORLD, codes


SESSIONS = {
    "a C program of 4 ranks": Session(0, c_program, [
        "gw_comm_options options", "gw_store store", "gw_tensor t", "const char* specs",
        "gw_reducer_allreduce",
        "gw_reducer_ready", "gw_request request;", "gw_call_options call", "int64_t counts", "size_t size"
    ])
}
NOT_RUN = [("gradwire: ncclAllReduce of at least", "what the interposer prints, with GPUs")]
