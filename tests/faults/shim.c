/* Faults at the Nth call into libc that touches files below a folder; see shim.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NONE, NO_SPACE, IO, SHORT, KILL_BEFORE, KILL_AFTER, TORN };
enum { READS = 1, CHANGES = 2, WRITES = 4 };

struct control {
    int64_t count, nth, mode, bytes, hits;
    char last[512];
};

static struct control *control;
static const char *root;
static size_t root_length;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("FAULTS_CONTROL");
    root = getenv("FAULTS_ROOT");
    if (!path || !root) return;
    root = strdup(root); /* RQ's setproctitle writes over the environment */
    root_length = strlen(root);
    int fd = REAL(open)(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *at = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    REAL(close)(fd);
    if (at != MAP_FAILED) control = at;
}

static void die(void) {
    kill(getpid(), SIGKILL);
    pause();
}

/* The mode when this call is the Nth, else NONE. */
static int hit(const char *op, int kind, const char *path) {
    if (!control || !control->nth || strncmp(path, root, root_length)) return NONE;
    int mode = (int)control->mode;
    if (mode == NO_SPACE && kind == READS) return NONE;
    if ((mode == SHORT || mode == TORN) && kind != WRITES) return NONE;
    if (mode >= KILL_BEFORE && kind == READS) return NONE;
    if (__atomic_add_fetch(&control->count, 1, __ATOMIC_SEQ_CST) != control->nth) return NONE;
    snprintf(control->last, sizeof control->last, "%s %s", op, path + root_length);
    __atomic_add_fetch(&control->hits, 1, __ATOMIC_SEQ_CST);
    if (mode == KILL_BEFORE) die();
    return mode;
}

static int hit_fd(const char *op, int kind, int fd) {
    char name[64], path[512];
    if (!control || !control->nth) return NONE;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(name, path, sizeof path - 1);
    if (n < 0) return NONE;
    path[n] = 0;
    return hit(op, kind, path);
}

static int fails(int mode) {
    if (mode == NO_SPACE) errno = ENOSPC;
    if (mode == IO) errno = EIO;
    return mode == NO_SPACE || mode == IO;
}

#define PLAIN(type, name, op, kind, where, parameters, arguments)         \
    type name parameters {                                                \
        int mode = where;                                                 \
        if (fails(mode)) return -1;                                       \
        type done = REAL(name) arguments;                                 \
        if (mode == KILL_AFTER) die();                                    \
        return done;                                                      \
    }

#define OPENS(name, first_parameter, first_argument)                      \
    int name(first_parameter const char *path, int flags, ...) {          \
        va_list more;                                                     \
        va_start(more, flags);                                            \
        mode_t rights = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more);                                                     \
        int mode = hit("open", flags & O_CREAT ? CHANGES : READS, path);  \
        if (fails(mode)) return -1;                                       \
        int done = REAL(name)(first_argument path, flags, rights);        \
        if (mode == KILL_AFTER) die();                                    \
        return done;                                                      \
    }

#define NOTHING
#define COMMA ,
OPENS(open, NOTHING, NOTHING)
OPENS(open64, NOTHING, NOTHING)
OPENS(openat, int folder COMMA, folder COMMA)
OPENS(openat64, int folder COMMA, folder COMMA)
PLAIN(ssize_t, read, "read", READS, hit_fd("read", READS, fd), (int fd, void *to, size_t n), (fd, to, n))
PLAIN(int, fsync, "fsync", CHANGES, hit_fd("fsync", CHANGES, fd), (int fd), (fd))
PLAIN(int, fdatasync, "fdatasync", CHANGES, hit_fd("fdatasync", CHANGES, fd), (int fd), (fd))
PLAIN(int, link, "link", CHANGES, hit("link", CHANGES, to), (const char *from, const char *to), (from, to))
PLAIN(int, mkdir, "mkdir", CHANGES, hit("mkdir", CHANGES, path), (const char *path, mode_t rights), (path, rights))
PLAIN(int, rename, "rename", CHANGES, hit("rename", CHANGES, to), (const char *from, const char *to), (from, to))
PLAIN(int, unlink, "unlink", CHANGES, hit("unlink", CHANGES, path), (const char *path), (path))

ssize_t write(int fd, const void *data, size_t n) {
    int mode = hit_fd("write", WRITES, fd);
    if (fails(mode)) return -1;
    if (mode == SHORT) return REAL(write)(fd, data, n / 2 ? n / 2 : n);
    if (mode == TORN) {
        size_t part = control->bytes < 0 ? n / 2 : (size_t)control->bytes;
        if (part) REAL(write)(fd, data, part < n ? part : n);
        die();
    }
    ssize_t done = REAL(write)(fd, data, n);
    if (mode == KILL_AFTER) die();
    return done;
}
