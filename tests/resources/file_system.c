/* A library for LD_PRELOAD that takes the place of a file system without some call.
 *
 * GRADWIRE_FILE_SYSTEM=CALL:ERRNO:FOLDER makes CALL fail with ERRNO for paths below FOLDER. Calls: rename,
 * ftruncate, fchmod, fsync (of files), fsync_folder. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int fails(const char* call, const char* path) {
  char name[32], folder[512], whole[4096];
  int error = 0;
  const char* what = getenv("GRADWIRE_FILE_SYSTEM");
  if (what == NULL || sscanf(what, "%31[^:]:%d:%511s", name, &error, folder) != 3) return 0;
  if (strcmp(name, call) != 0 || realpath(path, whole) == NULL || strstr(whole, folder) != whole) return 0;
  errno = error;
  return 1;
}
static int file_fails(const char* call, int file) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  return fails(call, link);
}

int rename(const char* from, const char* to) {
  return fails("rename", from) ? -1 : (int)syscall(SYS_rename, from, to);
}
int ftruncate(int file, off_t bytes) {
  return file_fails("ftruncate", file) ? -1 : (int)syscall(SYS_ftruncate, file, bytes);
}
int ftruncate64(int file, off_t bytes) {
  return ftruncate(file, bytes);
}
int fchmod(int file, mode_t mode) {
  return file_fails("fchmod", file) ? -1 : (int)syscall(SYS_fchmod, file, mode);
}
int fsync(int file) {
  struct stat about;
  const int folder = fstat(file, &about) == 0 && S_ISDIR(about.st_mode);
  return file_fails(folder ? "fsync_folder" : "fsync", file) ? -1 : (int)syscall(SYS_fsync, file);
}
