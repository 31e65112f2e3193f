/* Loads the library, averages with two ranks on threads, and unloads the library, 50 times. The library's own
 * threads continue, so its code stays loaded and is used again.
 *
 * usage: unload_test LIBGRADWIRE */
#include <dirent.h>
#include <dlfcn.h>
#include <gradwire/gradwire.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

enum { kRounds = 50, kCount = 1 << 20 };

static void* library;
static float data[2][kCount];

static void* average(void* argument) {
  const int rank = *(int*)argument;
  __typeof__(&gw_comm_create) create = (__typeof__(create))dlsym(library, "gw_comm_create");
  __typeof__(&gw_allreduce) allreduce = (__typeof__(allreduce))dlsym(library, "gw_allreduce");
  __typeof__(&gw_comm_destroy) destroy = (__typeof__(destroy))dlsym(library, "gw_comm_destroy");
  const gw_comm_options options = {.size = sizeof options,
                                   .rendezvous = "local://unload",
                                   .rank = rank,
                                   .world = 2,
                                   .device = GW_HOST,
                                   .timeout_ms = 60000};
  gw_comm comm = NULL;
  const int failed = create(&options, &comm) != GW_OK ||
                     allreduce(comm, data[rank], kCount, GW_FLOAT32, GW_AVG, "int8", NULL, NULL) != GW_OK;
  return failed || destroy(comm) != GW_OK ? argument : NULL;
}

static int threads(void) {
  DIR* tasks = opendir("/proc/self/task");
  int count = -2; /* "." and ".." */
  while (readdir(tasks) != NULL) ++count;
  closedir(tasks);
  return count;
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  int ranks[2] = {0, 1}, first = 0;
  for (int round = 0; round < kRounds; ++round) {
    library = dlopen(argv[1], RTLD_NOW);
    if (library == NULL) return fprintf(stderr, "%s\n", dlerror()), 1;
    pthread_t thread;
    void *one = NULL, *other = NULL;
    if (pthread_create(&thread, NULL, average, &ranks[1]) != 0) return 2;
    one = average(&ranks[0]);
    pthread_join(thread, &other);
    if (one != NULL || other != NULL) return fprintf(stderr, "round %d: a call failed\n", round), 1;
    dlclose(library);
    if (round == 0) first = threads();
    for (int wait = 0; threads() > first && wait < 500; ++wait) usleep(10000); /* joined, but still listed */
    if (threads() > first) return fprintf(stderr, "round %d: more threads than before\n", round), 1;
  }
  return 0;
}
