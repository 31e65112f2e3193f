/* A minimal C program: joins a group and averages a buffer over it.
 *
 *   allreduce                         two ranks as threads of this process
 *   allreduce RENDEZVOUS RANK WORLD   one rank of several processes, e.g. tcp://node0:29500 0 4
 */
#define _POSIX_C_SOURCE 200809L
#include <gradwire/gradwire.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { COUNT = 1000 };

#define CHECK(call)                                                           \
  do {                                                                        \
    gw_status status = (call);                                                \
    if (status != GW_OK) {                                                    \
      fprintf(stderr, "%s: %s\n", gw_status_string(status), gw_last_error()); \
      exit(1);                                                                \
    }                                                                         \
  } while (0)

struct rank {
  const char* rendezvous;
  int rank, world;
};

static void* run(void* argument) {
  const struct rank* me = argument;
  float buffer[COUNT];
  gw_comm comm = NULL;
  gw_comm_options options = {.size = sizeof options};
  int i;
  options.rendezvous = me->rendezvous;
  options.rank = me->rank;
  options.world = me->world;
  options.device = GW_HOST;
  options.timeout_ms = 60000;
  for (i = 0; i < COUNT; ++i) buffer[i] = (float)(me->rank + i);

  CHECK(gw_comm_create(&options, &comm));
  CHECK(gw_allreduce(comm, buffer, COUNT, GW_FLOAT32, GW_AVG, "bf16", NULL, NULL));
  CHECK(gw_comm_destroy(comm));

  /* The mean of rank + i over the ranks. bfloat16 is accurate to 1/256, and each value is rounded twice. */
  for (i = 0; i < COUNT; ++i) {
    const float want = (float)(me->world - 1) / 2 + (float)i, error = buffer[i] - want;
    if (error > want / 128 + 1e-6f || -error > want / 128 + 1e-6f) {
      fprintf(stderr, "rank %d: element %d is %g, expected %g\n", me->rank, i, buffer[i], want);
      exit(1);
    }
  }
  printf("rank %d of %d: averaged %d floats through bfloat16\n", me->rank, me->world, COUNT);
  return NULL;
}

int main(int argc, char** argv) {
  if (gw_version() / 100 != GW_VERSION_MAJOR * 100 + GW_VERSION_MINOR) {
    fprintf(stderr, "compiled for %d.%d, loaded %d\n", GW_VERSION_MAJOR, GW_VERSION_MINOR, gw_version());
    return 1;
  }
  if (argc == 4) {
    struct rank me;
    me.rendezvous = argv[1];
    me.rank = atoi(argv[2]);
    me.world = atoi(argv[3]);
    run(&me);
  } else {
    struct rank ranks[2] = {{"local://example", 0, 2}, {"local://example", 1, 2}};
    pthread_t other;
    if (pthread_create(&other, NULL, run, &ranks[1]) != 0) return 1;
    run(&ranks[0]);
    pthread_join(other, NULL);
  }
  return 0;
}
