/* A layer under a process's system calls: it numbers those that change anything below one folder, writes them down, and
 * at one of them ends the process or fills the disk.
 *
 * The kernel itself hands each such call to `trapped` (seccomp), whoever makes it: Python, the C library, or a compiled
 * writer that goes around the C library, as that of safetensors does when it renames. What the handler calls carries a
 * mark in the sixth argument, which these calls do not have, and passes. Memory that is mapped to be written to a file
 * cannot be followed: such a call ends the process with 99. Calls that copy between files or link them are refused, so
 * that their callers read, write and rename.
 *
 * The log has a line for each call that succeeded, fields parted by tabs, and the data of a write behind its line.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>

#define MARK 0x76697472
#define call(number, a, b, c, d, e) syscall(number, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)MARK)

#if defined __x86_64__
#define ARGUMENT(context, number) ((context)->uc_mcontext.gregs[(const int[]){REG_RDI, REG_RSI, REG_RDX, REG_R10, REG_R8}[number]])
#define RESULT(context) ((context)->uc_mcontext.gregs[REG_RAX])
#elif defined __aarch64__
#define ARGUMENT(context, number) ((context)->uc_mcontext.regs[number])
#define RESULT(context) ((context)->uc_mcontext.regs[0])
#endif

enum how { LET, KILL, HALF, FULL };

static char folder[PATH_MAX];
static long calls, stop;
static enum how how;
static int record = -1;

static void end(int code) { call(SYS_exit_group, code, 0, 0, 0, 0); }

/* A line of the log and data behind it, in one call: no other thread's come between. */
static void put(const void *data, size_t size, const char *format, ...)
{
    char line[3 * PATH_MAX];
    va_list values;
    va_start(values, format);
    size_t length = (size_t)vsnprintf(line, sizeof line, format, values);
    va_end(values);
    struct iovec parts[] = {{line, length}, {(void *)data, size}};
    if (record >= 0 && call(SYS_writev, record, parts, 2, 0, 0) != (long)(length + size))
        end(98);
}

/* A line of one's own. */
void shim_note(const char *line) { put(NULL, 0, "%s\n", line); }

/* --- which calls concern the folder, and what becomes of them ----------------------------------------------------- */

static int below(const char *path)
{
    size_t size = strlen(folder);
    return size && !strncmp(path, folder, size) && (path[size] == '/' || !path[size]);
}

static int opened(int descriptor, char *path)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    long size = call(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1, 0);
    path[size < 0 ? 0 : size] = 0;
    return below(path);
}

static int named(int at, const char *name, char *path)
{
    char base[PATH_MAX] = "";
    if (name[0] == '/')
        return snprintf(path, PATH_MAX, "%s", name) < PATH_MAX && below(path);
    if (at == AT_FDCWD)
        call(SYS_getcwd, base, sizeof base, 0, 0, 0);
    else
        opened(at, base);
    return snprintf(path, PATH_MAX, "%s/%s", base, name) < PATH_MAX && below(path);
}

static int exists(const char *path) { return !call(SYS_faccessat, AT_FDCWD, path, F_OK, 0, 0); }

/* Count a call; whether it is to fail, or to be made by half, because the disk is full or the process ends in it. */
static int reached(void)
{
    long number = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    if (number == stop && how == KILL)
        end(137);
    return stop && (number == stop || (how == FULL && number > stop));
}

/* Count a call that is no write; whether it is to fail because it needs room and there is none. */
static int refused(int room)
{
    if (!reached())
        return 0;
    if (how == HALF)
        end(137);
    return how == FULL && room;
}

/* --- the calls: each is made, and its result or -errno returned --------------------------------------------------- */

#define MADE(...) (call(__VA_ARGS__) < 0 ? -errno : 0)

static long written(int descriptor, const void *data, size_t size, off_t at)
{
    char path[PATH_MAX];
    struct stat found;
    int number = at < 0 ? SYS_write : SYS_pwrite64, concerns = opened(descriptor, path), stops = concerns && reached();
    if (stops && how == FULL && (size < 2 || calls > stop))
        return -ENOSPC;
    off_t start = at;
    if (concerns && at < 0) {
        int appends = call(SYS_fcntl, descriptor, F_GETFL, 0, 0, 0) & O_APPEND;
        start = appends && !fstat(descriptor, &found) ? found.st_size : lseek(descriptor, 0, SEEK_CUR);
    }
    long done = call(number, descriptor, data, stops ? size / 2 : size, at, 0);
    if (done < 0)
        return -errno;
    if (stops && how == HALF)
        end(137);
    if (concerns) {
        put(data, (size_t)done, "write\t%s\t%lld\t%ld\n", path, (long long)start, done);
    }
    return done;
}

/* Of several pieces one is written: the caller goes on with the rest, as after any short write. */
static long gathered(int descriptor, const struct iovec *parts, int count, off_t at)
{
    int part = 0;
    while (part < count - 1 && !parts[part].iov_len)
        part++;
    return count ? written(descriptor, parts[part].iov_base, parts[part].iov_len, at) : 0;
}

static long cut(int descriptor, const char *name, off_t size)
{
    char path[PATH_MAX];
    int concerns = name ? named(AT_FDCWD, name, path) : opened(descriptor, path);
    if (concerns)
        refused(0);
    long failed = name ? MADE(SYS_truncate, name, size, 0, 0, 0) : MADE(SYS_ftruncate, descriptor, size, 0, 0, 0);
    if (concerns && !failed)
        put(NULL, 0, "truncate\t%s\t%lld\n", path, (long long)size);
    return failed;
}

static long synced(long number, int descriptor)
{
    char path[PATH_MAX];
    int concerns = opened(descriptor, path);
    if (concerns && refused(1)) /* some file systems take room only as data goes to the disk */
        return -ENOSPC;
    long failed = MADE(number, descriptor, 0, 0, 0, 0);
    if (concerns && !failed)
        put(NULL, 0, "sync\t%s\n", path);
    return failed;
}

static long open_at(int at, const char *name, int flags, mode_t mode)
{
    char path[PATH_MAX];
    int changes = (flags & (O_CREAT | O_TRUNC)) && named(at, name, path), there = changes && exists(path);
    changes = changes && (!there || (flags & O_TRUNC));
    if (changes && refused(!there))
        return -ENOSPC;
    long descriptor = call(SYS_openat, at, name, flags, mode, 0);
    if (descriptor < 0)
        return -errno;
    if (changes)
        put(NULL, 0, there ? "truncate\t%s\t0\n" : "create\t%s\n", path);
    return descriptor;
}

static long renamed(int from, const char *old, int to, const char *new, unsigned flags)
{
    char before[PATH_MAX], after[PATH_MAX];
    int leaves = named(from, old, before), comes = named(to, new, after);
    if ((leaves || comes) && refused(1))
        return -ENOSPC;
    long failed = MADE(SYS_renameat2, from, old, to, new, flags);
    if ((leaves || comes) && !failed)
        put(NULL, 0, "rename\t%s\t%s\n", before, after);
    return failed;
}

static long removed(int at, const char *name, int flags)
{
    char path[PATH_MAX];
    int concerns = named(at, name, path) && exists(path);
    if (concerns)
        refused(0);
    long failed = MADE(SYS_unlinkat, at, name, flags, 0, 0);
    if (concerns && !failed)
        put(NULL, 0, "%s\t%s\n", flags & AT_REMOVEDIR ? "rmdir" : "unlink", path);
    return failed;
}

static long made(int at, const char *name, mode_t mode)
{
    char path[PATH_MAX];
    int concerns = named(at, name, path) && !exists(path);
    if (concerns && refused(1))
        return -ENOSPC;
    long failed = MADE(SYS_mkdirat, at, name, mode, 0, 0);
    if (concerns && !failed)
        put(NULL, 0, "mkdir\t%s\n", path);
    return failed;
}

static long answered(long number, long a, long b, long c, long d, long e)
{
    char path[PATH_MAX];
    switch (number) {
    case SYS_write: return written((int)a, (void *)b, (size_t)c, -1);
    case SYS_pwrite64: return written((int)a, (void *)b, (size_t)c, d);
    case SYS_writev: return gathered((int)a, (void *)b, (int)c, -1);
    case SYS_pwritev: return gathered((int)a, (void *)b, (int)c, d);
    case SYS_ftruncate: return cut((int)a, NULL, b);
    case SYS_truncate: return cut(-1, (char *)a, b);
    case SYS_fsync: return synced(SYS_fsync, (int)a);
    case SYS_fdatasync: return synced(SYS_fdatasync, (int)a);
    case SYS_openat: return open_at((int)a, (char *)b, (int)c, (mode_t)d);
    case SYS_renameat2: return renamed((int)a, (char *)b, (int)c, (char *)d, (unsigned)e);
    case SYS_unlinkat: return removed((int)a, (char *)b, (int)c);
    case SYS_mkdirat: return made((int)a, (char *)b, (mode_t)c);
#ifdef SYS_renameat
    case SYS_renameat: return renamed((int)a, (char *)b, (int)c, (char *)d, 0);
#endif
#ifdef SYS_open /* the older forms, which newer machines do without */
    case SYS_open: return open_at(AT_FDCWD, (char *)a, (int)b, (mode_t)c);
    case SYS_creat: return open_at(AT_FDCWD, (char *)a, O_CREAT | O_WRONLY | O_TRUNC, (mode_t)b);
    case SYS_rename: return renamed(AT_FDCWD, (char *)a, AT_FDCWD, (char *)b, 0);
    case SYS_unlink: return removed(AT_FDCWD, (char *)a, 0);
    case SYS_rmdir: return removed(AT_FDCWD, (char *)a, AT_REMOVEDIR);
    case SYS_mkdir: return made(AT_FDCWD, (char *)a, (mode_t)b);
#endif
    case SYS_mmap:
        if (opened((int)e, path))
            end(99);
    }
    return -EINVAL; /* copies in the kernel, links, and other ways to write: whoever asks does it by the calls above */
}

static const int TRAPPED[] = {
    SYS_write, SYS_pwrite64, SYS_writev, SYS_pwritev, SYS_ftruncate, SYS_truncate, SYS_fsync, SYS_fdatasync, SYS_openat,
    SYS_renameat2, SYS_unlinkat, SYS_mkdirat, SYS_sendfile, SYS_copy_file_range, SYS_splice, SYS_fallocate, SYS_pwritev2,
    SYS_linkat, SYS_symlinkat, SYS_io_uring_setup,
#ifdef SYS_renameat
    SYS_renameat,
#endif
#ifdef SYS_open
    SYS_open, SYS_creat, SYS_rename, SYS_unlink, SYS_rmdir, SYS_mkdir, SYS_link, SYS_symlink,
#endif
};

static void trapped(int signal, siginfo_t *info, void *context)
{
    ucontext_t *at = context;
    int before = errno;
    (void)signal;
    RESULT(at) = answered(info->si_syscall, ARGUMENT(at, 0), ARGUMENT(at, 1), ARGUMENT(at, 2), ARGUMENT(at, 3), ARGUMENT(at, 4));
    errno = before;
}

/* --- what Python calls -------------------------------------------------------------------------------------------- */

/* Number the calls that concern `path`, for as long as this process lives. At number `number` they end: before the call
 * (KILL), in the middle of it where it writes (HALF), or with the error of a full disk, as all that follow and need
 * room (FULL). 0, or an error's number where the kernel does not let a process trap its own calls. */
int shim_arm(const char *path, long number, int manner, const char *log)
{
    enum { COUNT = sizeof TRAPPED / sizeof *TRAPPED };
    struct sock_filter program[COUNT + 13], *next = program;
    struct sock_fprog filter = {COUNT + 13, program};
    struct sigaction action = {.sa_sigaction = trapped, .sa_flags = SA_SIGINFO | SA_NODEFER};
#define LOAD(field) *next++ = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define TEST(how, value, then, other) *next++ = (struct sock_filter)BPF_JUMP(BPF_JMP | how | BPF_K, value, then, other)
#define RETURN(value) *next++ = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, value)
    LOAD(nr);
    for (int each = 0; each < COUNT; each++)
        TEST(BPF_JEQ, (uint32_t)TRAPPED[each], (uint8_t)(COUNT - each + 7), 0); /* to the mark */
    TEST(BPF_JEQ, SYS_mmap, 0, 6);
    LOAD(args[2]);
    TEST(BPF_JSET, PROT_WRITE, 0, 4);
    LOAD(args[3]);
    TEST(BPF_JSET, MAP_ANONYMOUS, 2, 0);
    TEST(BPF_JSET, MAP_SHARED, 0, 1);
    RETURN(SECCOMP_RET_TRAP);
    RETURN(SECCOMP_RET_ALLOW);
    LOAD(args[5]);
    TEST(BPF_JEQ, MARK, 0, 1);
    RETURN(SECCOMP_RET_ALLOW);
    RETURN(SECCOMP_RET_TRAP);
    record = log ? open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    calls = 0, stop = number, how = (enum how)manner;
    snprintf(folder, sizeof folder, "%s", path);
    sigaction(SIGSYS, &action, NULL);
    int failed = prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter);
    return failed ? errno : 0;
}

/* Number no more; how many there were. */
long shim_disarm(void)
{
    folder[0] = 0;
    return calls;
}
