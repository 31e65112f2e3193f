/* A program on the C ABI, for sweeps over refused resources: two ranks average gradients, save their state
 * and load it. Processes form a shrinkable group, and a failed rank tries to continue with the survivors.
 *
 * usage: program SPEC local         both ranks, on threads
 *        program SPEC ADDRESS RANK  one of two processes
 *
 * Prints a checksum of the result and exits with 0; or "STATUS: error" on stderr, and exits with 1. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <gradwire/gradwire.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kTensors = 3, kRows = 256, kColumns = 128, kCount = kRows * kColumns };

struct Rank {
  const char *spec, *address;
  int rank, processes; /* processes: nonzero if each rank is a process */
  float gradients[kTensors][kCount];
  char error[512];
};
static struct Rank ranks[2];

#define TRY(call)                                                                                   \
  do {                                                                                              \
    const gw_status status = (call);                                                                \
    if (status != GW_OK) {                                                                          \
      snprintf(r->error, sizeof r->error, "%s: %.400s", gw_status_string(status), gw_last_error()); \
      goto done;                                                                                    \
    }                                                                                               \
  } while (0)

static void* run(void* argument) {
  struct Rank* r = argument;
  gw_comm comm = {0}, part = {0}, rest = {0};
  gw_reducer reducer = {0};
  void* state = NULL;
  size_t size = 0;
  gw_tensor tensors[kTensors];
  void* addresses[kTensors];
  for (int i = 0; i < kTensors; ++i) {
    tensors[i] = (gw_tensor){sizeof tensors[i], 0, kRows, kColumns, GW_FLOAT32, r->gradients[i]};
    addresses[i] = r->gradients[i];
    for (int e = 0; e < kCount; ++e) r->gradients[i][e] = (float)((e * 7 + i * 5 + r->rank * 3) % 17) - 8;
  }
  const gw_comm_options options = {.size = sizeof options,
                                   .rendezvous = r->address,
                                   .rank = r->rank,
                                   .world = 2,
                                   .device = GW_HOST,
                                   .timeout_ms = 3000,
                                   .shrinkable = r->processes};
  TRY(gw_comm_create(&options, &comm));
  TRY(gw_reducer_create(comm, r->spec, tensors, kTensors, NULL, &reducer));
  TRY(gw_reducer_allreduce(reducer, addresses, NULL, NULL));
  TRY(gw_reducer_state_save(reducer, NULL, 0, &size));
  state = malloc(size);
  if (state == NULL) {
    snprintf(r->error, sizeof r->error, "GW_NO_MEMORY: the program's own");
    goto done;
  }
  TRY(gw_reducer_state_save(reducer, state, size, &size));
  TRY(gw_reducer_state_load(reducer, state, size));
  TRY(gw_reducer_allreduce(reducer, addresses, NULL, NULL));
  TRY(gw_allreduce(comm, r->gradients[0], kCount, GW_FLOAT32, GW_AVG, "int8", NULL, NULL));
  for (int i = 0; i < 8; ++i)
    TRY(gw_allreduce(comm, r->gradients[2], kCount, GW_FLOAT32, GW_AVG, "int4", NULL, NULL));
  TRY(gw_comm_split(comm, 0, r->rank, &part));
  TRY(gw_allreduce(part, r->gradients[1], kCount, GW_FLOAT32, GW_AVG, "fp8", NULL, NULL));
done:
  free(state);
  if (r->error[0] != 0 && r->processes) gw_comm_shrink(comm, 1000, NULL, &rest, NULL, 0);
  gw_reducer_destroy(reducer);
  gw_comm_destroy(rest);
  gw_comm_destroy(part);
  gw_comm_destroy(comm);
  return NULL;
}

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const int both = strcmp(argv[2], "local") == 0, first = both ? 0 : atoi(argv[3]),
            end = both ? 2 : first + 1;
  for (int i = first; i < end; ++i) {
    ranks[i].spec = argv[1];
    ranks[i].address = both ? "local://sweep" : argv[2];
    ranks[i].rank = i;
    ranks[i].processes = !both;
  }
  pthread_t thread;
  if (both && pthread_create(&thread, NULL, run, &ranks[1]) != 0) return 2;
  void (*begin)(void) = (void (*)(void))dlsym(RTLD_DEFAULT, "refuse_begin");
  if (begin != NULL) begin();
  run(&ranks[first]);
  if (both) pthread_join(thread, NULL);
  const char* error = NULL;
  for (int i = first; i < end && error == NULL; ++i) {
    if (ranks[i].error[0] != 0) error = ranks[i].error;
  }
  if (error != NULL) {
    for (int i = first; i < end; ++i) fprintf(stderr, "gradwire: rank %d: %s\n", i, ranks[i].error);
    return 1;
  }
  uint64_t sum = 14695981039346656037u;
  for (int i = 0; i < kTensors; ++i) {
    for (int e = 0; e < kCount; ++e) {
      uint32_t bits;
      memcpy(&bits, &ranks[first].gradients[i][e], sizeof bits);
      sum = (sum ^ bits) * 1099511628211u;
    }
  }
  printf("%016llx\n", (unsigned long long)sum);
  return 0;
}
