// Injects I/O faults into a process that is started with LD_PRELOAD: the n-th call of a kind fails with a given errno.
//
// Only calls that concern files below one directory count, so that the process loads its libraries undisturbed. The
// environment says what fails:
//   PENSTOCK_INJECT_DIRECTORY  the absolute path of that directory, without symbolic links
//   PENSTOCK_INJECT_KIND       the kind of call that fails, one of kKinds; without it, calls are only counted
//   PENSTOCK_INJECT_CALL       the first call of this kind that fails, from 1
//   PENSTOCK_INJECT_FORM       "once", or "always" for every call from this one on
//   PENSTOCK_INJECT_ERRNO      the errno of the failure
//   PENSTOCK_INJECT_COUNT      a file of sizeof(struct Board) bytes, which outlives a process that is aborted
//
// A short write is a kind of its own: it succeeds with half of the bytes. A close fails as it does on Linux: the
// descriptor is closed all the same. The other calls fail without an effect. Calls that libc makes inside itself are
// out of reach, such as the writes of fwrite and the close of closedir; neither Penstock nor libstdc++ writes so.
#define _GNU_SOURCE
#include "inject.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum Kind { WRITE, SHORT, FSYNC, RENAME, MMAP, OPEN, CLOSE, UNLINK, MKDIR, READ, READDIR, TRUNCATE, STAT, NEW, KINDS };

// The driver reads the counts in this order.
static const char* const kKinds[KINDS] = {"write",  "short", "fsync", "rename",  "mmap",     "open", "close",
                                          "unlink", "mkdir", "read",  "readdir", "truncate", "stat", "new"};

struct Board {
  _Atomic uint64_t calls[KINDS];
  // The first call that failed: its function, a space, and its path from the watched directory.
  char fault[1024];
};

// Path of the file that a call concerns.
struct Place {
  char path[2 * PATH_MAX];
};

static const char* directory = NULL;
static size_t directory_size = 0;
static enum Kind failing_kind = KINDS;
static uint64_t failing_call = 0;
static bool fails_always = false;
static int failing_errno = 0;
static struct Board unshared_board;
static struct Board* board = &unshared_board;
static atomic_bool has_failed = false;
// True after the first call that concerns the watched directory.
static atomic_bool is_in_use = false;

// Looks up the function that this library stands before. The result of dlsym is copied, as ISO C has no cast for it.
#define NEXT(function)                                   \
  ({                                                     \
    __typeof__(&function) next = NULL;                   \
    *(void**)(void*)&next = dlsym(RTLD_NEXT, #function); \
    next;                                                \
  })

static enum Kind kind_named(const char* name) {
  int kind = 0;
  while (kind < KINDS && (name == NULL || strcmp(name, kKinds[kind]) != 0)) ++kind;
  return (enum Kind)kind;
}

static uint64_t number_of(const char* variable) {
  const char* const text = getenv(variable);
  return text == NULL ? 0 : strtoull(text, NULL, 10);
}

static void share_board(const char* path) {
  const int file = NEXT(open)(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return;
  void* const shared = NEXT(mmap)(NULL, sizeof(struct Board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (shared != MAP_FAILED) board = shared;
  NEXT(close)(file);
}

__attribute__((constructor)) static void read_environment(void) {
  const char* const form = getenv("PENSTOCK_INJECT_FORM");
  const char* const count = getenv("PENSTOCK_INJECT_COUNT");
  fails_always = form != NULL && strcmp(form, "always") == 0;
  failing_kind = kind_named(getenv("PENSTOCK_INJECT_KIND"));
  failing_call = number_of("PENSTOCK_INJECT_CALL");
  failing_errno = (int)number_of("PENSTOCK_INJECT_ERRNO");
  if (count != NULL) share_board(count);
  directory = getenv("PENSTOCK_INJECT_DIRECTORY");
  if (directory != NULL) directory_size = strlen(directory);
}

static bool find_base(int base, struct Place* place) {
  if (base == AT_FDCWD) return getcwd(place->path, PATH_MAX) != NULL;
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", base);
  const ssize_t size = readlink(link, place->path, PATH_MAX - 1);
  place->path[size < 0 ? 0 : size] = '\0';
  return size >= 0;
}

static void stop_allocation_faults(void) {
  failing_kind = failing_kind == NEW ? KINDS : failing_kind;
}

static bool is_below_directory(const struct Place* place) {
  const bool is_below = strncmp(place->path, directory, directory_size) == 0 &&
                        (place->path[directory_size] == '/' || place->path[directory_size] == '\0');
  // Libtorch is loaded by now, so this handler runs before its own, which allocate and would abort the process.
  if (is_below && !atomic_exchange(&is_in_use, true)) atexit(stop_allocation_faults);
  return is_below;
}

// Finds the file of a descriptor. Returns true if it is below the directory.
static bool find_descriptor(int file, struct Place* place) {
  const int kept = errno;
  const bool is_found = directory != NULL && file >= 0 && find_base(file, place) && is_below_directory(place);
  errno = kept;
  return is_found;
}

// Finds the file of a path that is relative to `base`. Returns true if it is below the directory.
static bool find_path(int base, const char* path, struct Place* place) {
  if (directory == NULL || path == NULL) return false;
  const int kept = errno;
  bool is_found = path[0] == '/' || find_base(base, place);
  if (is_found) {
    const size_t size = path[0] == '/' ? 0 : strlen(place->path);
    snprintf(place->path + size, sizeof place->path - size, size == 0 ? "%s" : "/%s", path);
    is_found = is_below_directory(place);
  }
  errno = kept;
  return is_found;
}

static void record(const char* function, const char* path) {
  if (atomic_exchange(&has_failed, true)) return;
  const bool is_below = strncmp(path, directory, directory_size) == 0;
  const char* const shown = is_below ? path + directory_size : path;
  snprintf(board->fault, sizeof board->fault, "%s %s%.900s", function, is_below ? "." : "", shown);
}

// Counts a call and returns true if it has to fail.
static bool fails(enum Kind kind, const char* function, const struct Place* place) {
  const uint64_t call = atomic_fetch_add(&board->calls[kind], 1) + 1;
  if (kind != failing_kind || (fails_always ? call < failing_call : call != failing_call)) return false;
  record(function, place->path);
  return true;
}

static bool descriptor_fails(enum Kind kind, const char* function, int file) {
  struct Place place;
  return find_descriptor(file, &place) && fails(kind, function, &place);
}

static bool path_fails(enum Kind kind, const char* function, int base, const char* path) {
  struct Place place;
  return find_path(base, path, &place) && fails(kind, function, &place);
}

static int error(void) {
  errno = failing_errno;
  return -1;
}

int inject_allocation_fails(void) {
  if (failing_kind != NEW || !atomic_load(&is_in_use)) return 0;
  static const struct Place kNowhere = {.path = "allocation"};
  return fails(NEW, "operator new", &kNowhere);
}

#define EXPORTED __attribute__((visibility("default")))

EXPORTED ssize_t write(int file, const void* data, size_t size) {
  if (descriptor_fails(WRITE, "write", file)) return error();
  if (size > 1 && descriptor_fails(SHORT, "write", file)) size /= 2;
  return NEXT(write)(file, data, size);
}

#define DEFINE_PWRITE(name)                                                  \
  EXPORTED ssize_t name(int file, const void* data, size_t size, off_t at) { \
    if (descriptor_fails(WRITE, #name, file)) return error();                \
    if (size > 1 && descriptor_fails(SHORT, #name, file)) size /= 2;         \
    return NEXT(name)(file, data, size, at);                                 \
  }
DEFINE_PWRITE(pwrite)
DEFINE_PWRITE(pwrite64)

EXPORTED ssize_t writev(int file, const struct iovec* parts, int count) {
  if (descriptor_fails(WRITE, "writev", file)) return error();
  if (count > 0 && parts[0].iov_len > 1 && descriptor_fails(SHORT, "writev", file)) {
    return NEXT(write)(file, parts[0].iov_base, parts[0].iov_len / 2);
  }
  return NEXT(writev)(file, parts, count);
}

#define DEFINE_FOR_DESCRIPTOR(kind, result, name, parameters, ...)   \
  EXPORTED result name parameters {                                  \
    if (descriptor_fails(kind, #name, file)) return (result)error(); \
    return NEXT(name)(__VA_ARGS__);                                  \
  }
DEFINE_FOR_DESCRIPTOR(FSYNC, int, fsync, (int file), file)
DEFINE_FOR_DESCRIPTOR(FSYNC, int, fdatasync, (int file), file)
DEFINE_FOR_DESCRIPTOR(READ, ssize_t, read, (int file, void* data, size_t size), file, data, size)
DEFINE_FOR_DESCRIPTOR(READ, ssize_t, pread, (int file, void* data, size_t size, off_t at), file, data, size, at)
DEFINE_FOR_DESCRIPTOR(READ, ssize_t, pread64, (int file, void* data, size_t size, off_t at), file, data, size, at)
DEFINE_FOR_DESCRIPTOR(READ, ssize_t, readv, (int file, const struct iovec* parts, int count), file, parts, count)
DEFINE_FOR_DESCRIPTOR(TRUNCATE, int, ftruncate, (int file, off_t size), file, size)
DEFINE_FOR_DESCRIPTOR(TRUNCATE, int, ftruncate64, (int file, off_t size), file, size)
DEFINE_FOR_DESCRIPTOR(TRUNCATE, int, fallocate, (int file, int mode, off_t at, off_t size), file, mode, at, size)
DEFINE_FOR_DESCRIPTOR(TRUNCATE, int, fallocate64, (int file, int mode, off_t at, off_t size), file, mode, at, size)
DEFINE_FOR_DESCRIPTOR(STAT, int, fstat, (int file, struct stat* status), file, status)
DEFINE_FOR_DESCRIPTOR(STAT, int, fstat64, (int file, struct stat64* status), file, status)

// MAP_FAILED is -1 as a pointer.
#define DEFINE_MMAP(name)                                                                                \
  EXPORTED void* name(void* address, size_t size, int access, int flags, int file, off_t at) {           \
    if ((flags & MAP_ANONYMOUS) == 0 && descriptor_fails(MMAP, #name, file)) return error(), MAP_FAILED; \
    return NEXT(name)(address, size, access, flags, file, at);                                           \
  }
DEFINE_MMAP(mmap)
DEFINE_MMAP(mmap64)

EXPORTED int close(int file) {
  const bool is_failing = descriptor_fails(CLOSE, "close", file);
  const int result = NEXT(close)(file);
  return is_failing ? error() : result;
}

EXPORTED int fclose(FILE* file) {
  const bool is_failing = descriptor_fails(CLOSE, "fclose", fileno(file));
  const int result = NEXT(fclose)(file);
  return is_failing ? error() : result;
}

#define DEFINE_READDIR(name, entry)                                            \
  EXPORTED struct entry* name(DIR* stream) {                                   \
    if (descriptor_fails(READDIR, #name, dirfd(stream))) return error(), NULL; \
    return NEXT(name)(stream);                                                 \
  }
DEFINE_READDIR(readdir, dirent)
DEFINE_READDIR(readdir64, dirent64)

// Reads the mode that follows the flags of a call that may create a file.
#define READ_MODE(mode, flags)                          \
  mode_t mode = 0;                                      \
  if (((flags) & O_CREAT) || ((flags) & __O_TMPFILE)) { \
    va_list rest;                                       \
    va_start(rest, flags);                              \
    mode = va_arg(rest, mode_t);                        \
    va_end(rest);                                       \
  }

#define DEFINE_OPEN(name)                                        \
  EXPORTED int name(const char* path, int flags, ...) {          \
    READ_MODE(mode, flags)                                       \
    if (path_fails(OPEN, #name, AT_FDCWD, path)) return error(); \
    return NEXT(name)(path, flags, mode);                        \
  }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)

#define DEFINE_OPENAT(name)                                       \
  EXPORTED int name(int base, const char* path, int flags, ...) { \
    READ_MODE(mode, flags)                                        \
    if (path_fails(OPEN, #name, base, path)) return error();      \
    return NEXT(name)(base, path, flags, mode);                   \
  }
DEFINE_OPENAT(openat)
DEFINE_OPENAT(openat64)

#define DEFINE_FOPEN(name)                                             \
  EXPORTED FILE* name(const char* path, const char* mode) {            \
    if (path_fails(OPEN, #name, AT_FDCWD, path)) return error(), NULL; \
    return NEXT(name)(path, mode);                                     \
  }
DEFINE_FOPEN(fopen)
DEFINE_FOPEN(fopen64)

#define DEFINE_FOR_PATH(kind, name, base, parameters, ...)   \
  EXPORTED int name parameters {                             \
    if (path_fails(kind, #name, base, path)) return error(); \
    return NEXT(name)(__VA_ARGS__);                          \
  }
DEFINE_FOR_PATH(OPEN, creat, AT_FDCWD, (const char* path, mode_t mode), path, mode)
DEFINE_FOR_PATH(OPEN, creat64, AT_FDCWD, (const char* path, mode_t mode), path, mode)
DEFINE_FOR_PATH(RENAME, rename, AT_FDCWD, (const char* path, const char* to), path, to)
DEFINE_FOR_PATH(RENAME, renameat, base, (int base, const char* path, int base_to, const char* to), base, path, base_to,
                to)
DEFINE_FOR_PATH(RENAME, renameat2, base, (int base, const char* path, int base_to, const char* to, unsigned flags),
                base, path, base_to, to, flags)
DEFINE_FOR_PATH(UNLINK, unlink, AT_FDCWD, (const char* path), path)
DEFINE_FOR_PATH(UNLINK, unlinkat, base, (int base, const char* path, int flags), base, path, flags)
DEFINE_FOR_PATH(UNLINK, rmdir, AT_FDCWD, (const char* path), path)
DEFINE_FOR_PATH(UNLINK, remove, AT_FDCWD, (const char* path), path)
DEFINE_FOR_PATH(MKDIR, mkdir, AT_FDCWD, (const char* path, mode_t mode), path, mode)
DEFINE_FOR_PATH(MKDIR, mkdirat, base, (int base, const char* path, mode_t mode), base, path, mode)
DEFINE_FOR_PATH(STAT, stat, AT_FDCWD, (const char* path, struct stat* status), path, status)
DEFINE_FOR_PATH(STAT, stat64, AT_FDCWD, (const char* path, struct stat64* status), path, status)
DEFINE_FOR_PATH(STAT, lstat, AT_FDCWD, (const char* path, struct stat* status), path, status)
DEFINE_FOR_PATH(STAT, lstat64, AT_FDCWD, (const char* path, struct stat64* status), path, status)
DEFINE_FOR_PATH(STAT, fstatat, base, (int base, const char* path, struct stat* status, int flags), base, path, status,
                flags)
