/* A library for LD_PRELOAD that refuses the n-th request for a resource, as an exhausted machine does.
 *
 * GRADWIRE_REFUSE=KIND:N refuses request N of KIND, counted from 1 over all threads. KIND:N-M refuses
 * requests N to M, and KIND:N+ all from N on. none:0 refuses no request.
 *
 * GRADWIRE_REFUSE_LOG=FILE writes a line "refused KIND N" at the refusal, and a line "seen KIND COUNT" for
 * each kind when the process ends.
 *
 * GRADWIRE_REFUSE_LATER=1 counts requests only after the program has called refuse_begin(), which it finds
 * with dlsym(). Otherwise requests are counted from main() on: before main(), CUDA's runtime registers the
 * kernels, and crashes if that allocation fails.
 *
 * GRADWIRE_LACKS=CALL:ERRNO:FOLDER makes every CALL (rename, ftruncate, fsync of files, fsync_folder) fail
 * with ERRNO for paths below FOLDER, as on a file system without that call.
 *
 * Kinds: malloc (64 KiB or more), small (any size), mmap, thread, eventfd, socket, accept, open, write
 * (regular files), sync (fsync, ftruncate), rename. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char log_path[512];
static long at, last; /* the first and the last refused request */
static atomic_int counting;
enum { kMalloc, kSmall, kMmap, kThread, kEventfd, kSocket, kAccept, kOpen, kWrite, kSync, kRename, kKinds };
static const char* const names[kKinds] = {"malloc", "small", "mmap",  "thread", "eventfd", "socket",
                                          "accept", "open",  "write", "sync",   "rename"};
static int wanted = -1;
static atomic_long seen[kKinds];

void refuse_begin(void) {
  atomic_store(&counting, 1);
}

static void log_line(const char* word, const char* kind, long n) {
  if (log_path[0] == 0) return;
  char line[64];
  const int bytes = snprintf(line, sizeof line, "%s %s %ld\n", word, kind, n);
  const int file =
      (int)syscall(SYS_openat, AT_FDCWD, log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (file < 0) return;
  syscall(SYS_write, file, line, (size_t)bytes);
  syscall(SYS_close, file);
}

__attribute__((constructor)) static void read_environment(void) {
  const char* what = getenv("GRADWIRE_REFUSE");
  const char* path = getenv("GRADWIRE_REFUSE_LOG");
  const char* colon = what != NULL ? strchr(what, ':') : NULL;
  if (colon == NULL) return;
  if (path != NULL && strlen(path) < sizeof log_path) strcpy(log_path, path);
  for (int k = 0; k < kKinds; ++k) {
    if (strncmp(what, names[k], (size_t)(colon - what)) == 0 && strlen(names[k]) == (size_t)(colon - what))
      wanted = k;
  }
  char* end = NULL;
  at = last = strtol(colon + 1, &end, 10);
  if (*end == '+') last = LONG_MAX;
  if (*end == '-') last = atol(end + 1);
}

static int (*program)(int, char**, char**);
static int counted(int count, char** arguments, char** environment) {
  if (getenv("GRADWIRE_REFUSE_LATER") == NULL) refuse_begin();
  return program(count, arguments, environment);
}

int __libc_start_main(int (*main)(int, char**, char**), int count, char** arguments, void (*init)(void),
                      void (*fini)(void), void (*rtld_fini)(void), void* stack_end) {
  __typeof__(&__libc_start_main) next = (__typeof__(&__libc_start_main))dlsym(RTLD_NEXT, "__libc_start_main");
  program = main;
  return next(counted, count, arguments, init, fini, rtld_fini, stack_end);
}

__attribute__((destructor)) static void report(void) {
  for (int k = 0; k < kKinds; ++k) log_line("seen", names[k], atomic_load(&seen[k]));
}

/* Returns whether to refuse this request for a `kind`. */
static int refused(int kind, int error) {
  if (!atomic_load_explicit(&counting, memory_order_relaxed)) return 0;
  const long n = atomic_fetch_add_explicit(&seen[kind], 1, memory_order_relaxed) + 1;
  if (kind != wanted || n < at || n > last) return 0;
  if (n == at) log_line("refused", names[kind], n);
  errno = error;
  return 1;
}

/* Serves the allocations of dlsym() before the real functions are known. */
static char early[1 << 16];
static atomic_size_t early_used;
static void* early_memory(size_t bytes) {
  const size_t begin = atomic_fetch_add(&early_used, (bytes + 31) / 16 * 16);
  return begin + bytes <= sizeof early ? early + (begin + 15) / 16 * 16 : NULL;
}
static int is_early(const void* p) {
  return (const char*)p >= early && (const char*)p < early + sizeof early;
}

static __thread int looking_up;
#define NEXT(name)                                     \
  static __typeof__(&name) next;                       \
  if (next == NULL) {                                  \
    ++looking_up;                                      \
    next = (__typeof__(&name))dlsym(RTLD_NEXT, #name); \
    --looking_up;                                      \
  }

static int no_memory(size_t bytes) {
  const int large = bytes >= 65536 && refused(kMalloc, ENOMEM);
  return refused(kSmall, ENOMEM) || large;
}

void* malloc(size_t bytes) {
  if (looking_up) return early_memory(bytes);
  NEXT(malloc)
  return no_memory(bytes) ? NULL : next(bytes);
}
void* calloc(size_t count, size_t bytes) {
  if (looking_up) return early_memory(count * bytes);
  NEXT(calloc)
  return no_memory(count * bytes) ? NULL : next(count, bytes);
}
void* realloc(void* p, size_t bytes) {
  NEXT(realloc)
  if (is_early(p)) {
    void* fresh = malloc(bytes);
    if (fresh != NULL)
      memcpy(fresh, p,
             bytes < (size_t)(early + sizeof early - (char*)p) ? bytes
                                                               : (size_t)(early + sizeof early - (char*)p));
    return fresh;
  }
  return no_memory(bytes) ? NULL : next(p, bytes);
}
void free(void* p) {
  if (is_early(p)) return;
  NEXT(free)
  next(p);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  NEXT(aligned_alloc)
  return no_memory(bytes) ? NULL : next(alignment, bytes);
}
int posix_memalign(void** p, size_t alignment, size_t bytes) {
  NEXT(posix_memalign)
  return no_memory(bytes) ? ENOMEM : next(p, alignment, bytes);
}

void* mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset) {
  if (refused(kMmap, ENOMEM)) return MAP_FAILED;
  return (void*)syscall(SYS_mmap, address, bytes, protection, flags, file, offset);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
                   void* argument) {
  NEXT(pthread_create)
  return refused(kThread, EAGAIN) ? EAGAIN : next(thread, attributes, body, argument);
}

int eventfd(unsigned count, int flags) {
  NEXT(eventfd)
  return refused(kEventfd, EMFILE) ? -1 : next(count, flags);
}
int socket(int domain, int type, int protocol) {
  NEXT(socket)
  return refused(kSocket, EMFILE) ? -1 : next(domain, type, protocol);
}
int accept4(int listener, struct sockaddr* address, socklen_t* length, int flags) {
  NEXT(accept4)
  return refused(kAccept, EMFILE) ? -1 : next(listener, address, length, flags);
}

#define MODE(flags)                             \
  mode_t mode = 0;                              \
  if (((flags) & (O_CREAT | O_TMPFILE)) != 0) { \
    va_list rest;                               \
    va_start(rest, flags);                      \
    mode = va_arg(rest, mode_t);                \
    va_end(rest);                               \
  }
int open(const char* path, int flags, ...) {
  MODE(flags)
  return refused(kOpen, EMFILE) ? -1 : (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}
int open64(const char* path, int flags, ...) {
  MODE(flags)
  return refused(kOpen, EMFILE) ? -1 : (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}
int openat(int folder, const char* path, int flags, ...) {
  MODE(flags)
  return refused(kOpen, EMFILE) ? -1 : (int)syscall(SYS_openat, folder, path, flags, mode);
}
FILE* fopen(const char* path, const char* mode) {
  NEXT(fopen)
  return refused(kOpen, EMFILE) ? NULL : next(path, mode);
}
FILE* fopen64(const char* path, const char* mode) {
  NEXT(fopen64)
  return refused(kOpen, EMFILE) ? NULL : next(path, mode);
}

static int full(int file) {
  struct stat about;
  return fstat(file, &about) == 0 && S_ISREG(about.st_mode) && refused(kWrite, ENOSPC);
}
ssize_t write(int file, const void* data, size_t bytes) {
  return full(file) ? -1 : syscall(SYS_write, file, data, bytes);
}
ssize_t writev(int file, const struct iovec* parts, int count) {
  return full(file) ? -1 : syscall(SYS_writev, file, parts, count);
}
size_t fwrite(const void* data, size_t size, size_t count, FILE* file) {
  NEXT(fwrite)
  return full(fileno(file)) ? 0 : next(data, size, count, file);
}
ssize_t pwrite(int file, const void* data, size_t bytes, off_t at_byte) {
  return full(file) ? -1 : syscall(SYS_pwrite64, file, data, bytes, at_byte);
}
ssize_t pwrite64(int file, const void* data, size_t bytes, off_t at_byte) {
  return pwrite(file, data, bytes, at_byte);
}

/* Returns whether the file system of `path` lacks a call. */
static int lacks(const char* call, const char* path) {
  char name[32], folder[512], whole[4096];
  int error = 0;
  const char* what = getenv("GRADWIRE_LACKS");
  if (what == NULL || sscanf(what, "%31[^:]:%d:%511s", name, &error, folder) != 3) return 0;
  if (strcmp(name, call) != 0 || realpath(path, whole) == NULL || strstr(whole, folder) != whole) return 0;
  errno = error;
  return 1;
}
static int file_lacks(const char* call, int file) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  return lacks(call, link);
}

int fsync(int file) {
  struct stat about;
  const int folder = fstat(file, &about) == 0 && S_ISDIR(about.st_mode);
  if (file_lacks(folder ? "fsync_folder" : "fsync", file)) return -1;
  return refused(kSync, EIO) ? -1 : (int)syscall(SYS_fsync, file);
}
int fdatasync(int file) {
  return refused(kSync, EIO) ? -1 : (int)syscall(SYS_fdatasync, file);
}
int ftruncate(int file, off_t bytes) {
  if (file_lacks("ftruncate", file)) return -1;
  return refused(kSync, EIO) ? -1 : (int)syscall(SYS_ftruncate, file, bytes);
}
int ftruncate64(int file, off_t bytes) {
  return ftruncate(file, bytes);
}
/* Fails with EXDEV, as between two file systems. */
int rename(const char* from, const char* to) {
  if (lacks("rename", from)) return -1;
  return refused(kRename, EXDEV) ? -1 : (int)syscall(SYS_rename, from, to);
}
