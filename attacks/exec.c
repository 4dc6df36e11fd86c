/* Tries, one by one, the ways to execute a file, and says of each what came of it, as probe.c does:
 *
 *     NAME: refused ERRNO      it was not executed, or not mapped
 *     NAME: reached            it ran
 *
 * exec ROOT SCRATCH...: ROOT is what the image's root is (empty inside the machine), the first SCRATCH stands
 * for /workspace, the others for the file systems that never execute. A program that runs says so by its exit
 * code: 42 for one that the image lists and for everything made of it, 43 for one that it does not list.
 *
 * The same source, built with -shared, is the library for LD_PRELOAD: its constructor exits with 43.
 * Built as a dynamic program it only exits with 42 when it is called `hello`.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef LIBRARY
__attribute__((constructor)) static void loaded(void) { _exit(43); }
#else

#ifndef CODE
#define CODE 42
#endif

static const char *root, *scratch;
static char *none[] = { NULL };

/* Runs the attempt in a child, which executes something or exits with 100 after it sent its errno. */
static int tried(int (*try)(const char *), const char *argument, int *error) {
    int ends[2], status;
    if (pipe2(ends, O_CLOEXEC) != 0) exit(1);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        int null = open("/dev/null", O_RDWR);
        dup2(null, 2);
        errno = 0;
        int done = try(argument);
        int mine = errno;
        if (done >= 0) _exit(done);
        if (write(ends[1], &mine, sizeof mine) != sizeof mine) _exit(101);
        _exit(100);
    }
    close(ends[1]);
    *error = 0;
    if (read(ends[0], error, sizeof *error) != sizeof *error) *error = 0;
    close(ends[0]);
    if (waitpid(child, &status, 0) != child) exit(1);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void row(const char *name, int (*try)(const char *), const char *argument, int wanted) {
    int error, code = tried(try, argument, &error);
    if (code == wanted) printf("%s: reached\n", name);
    else if (error) printf("%s: refused %s\n", name, strerrorname_np(error));
    else printf("%s: refused code-%d\n", name, code);
    fflush(stdout);
}

static const char *in(const char *folder, const char *name) {
    static char paths[8][512];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static void copy(const char *from, const char *to, int mode) {
    static char bytes[1 << 16];
    ssize_t count;
    unlink(to);
    int in = open(from, O_RDONLY), out = open(to, O_CREAT | O_WRONLY | O_TRUNC, 0700);
    if (in < 0 || out < 0) { perror(from); perror(to); exit(1); }
    while ((count = read(in, bytes, sizeof bytes)) > 0)
        if (write(out, bytes, count) != count) { perror(to); exit(1); }
    fchmod(out, mode);
    close(in);
    close(out);
}

static void text(const char *path, const char *line) {
    int out = open(path, O_CREAT | O_WRONLY | O_TRUNC, 0700);
    if (out < 0 || write(out, line, strlen(line)) != (ssize_t)strlen(line)) { perror(path); exit(1); }
    close(out);
}

static int plain(const char *path) { char *argv[] = { "hello", NULL }; return execve(path, argv, none); }
static int shell(const char *path) {
    char *argv[] = { "sh", "-c", (char *)path, NULL };
    return execve("/bin/sh", argv, none);
}
static int read_by_shell(const char *path) {
    char *argv[] = { "sh", (char *)path, NULL };
    return execve("/bin/sh", argv, none);
}
static int by_descriptor(const char *path) {
    int file = open(path, O_RDONLY);
    char *argv[] = { "hello", NULL };
    return file < 0 ? -1 : (int)syscall(SYS_execveat, file, "", argv, none, AT_EMPTY_PATH);
}
static int by_proc(const char *path) {
    char name[64];
    int file = open(path, O_RDONLY);
    if (file < 0) return -1;
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    return plain(name);
}
/* Writes the file's bytes into another that has no name, and executes that. */
static int nameless(int hidden, const char *path) {
    static char bytes[1 << 16];
    ssize_t count;
    char name[64];
    int from = open(path, O_RDONLY);
    if (hidden < 0 || from < 0) return -1;
    while ((count = read(from, bytes, sizeof bytes)) > 0)
        if (write(hidden, bytes, count) != count) return -1;
    /* A file that is open for writing is not executed: take another descriptor of it. */
    snprintf(name, sizeof name, "/proc/self/fd/%d", hidden);
    int reading = open(name, O_RDONLY);
    close(hidden);
    char *argv[] = { "hello", NULL };
    return reading < 0 ? -1 : (int)syscall(SYS_execveat, reading, "", argv, none, AT_EMPTY_PATH);
}
static int by_memfd(const char *path) { return nameless((int)syscall(SYS_memfd_create, "x", 0), path); }
static int by_tmpfile(const char *path) {
    return nameless(open(scratch, O_TMPFILE | O_RDWR, 0700), path);
}
static int by_loader(const char *path) {
    char *argv[] = { "ld.so", "--argv0", "hello", (char *)path, NULL };
    return execve(in(root, "lib64/ld-linux-x86-64.so.2"), argv, none);
}
static int preloaded(const char *path) {
    char variable[600], *argv[] = { "hello", NULL }, *env[] = { variable, NULL };
    snprintf(variable, sizeof variable, "LD_PRELOAD=%s", path);
    return execve(in(root, "bin/dynamic"), argv, env);
}
static int mapped(const char *path) {
    int file = open(path, O_RDONLY);
    return mmap(NULL, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, file, 0) == MAP_FAILED ? -1 : 42;
}
static int protected(const char *path) {
    void *there = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, open(path, O_RDONLY), 0);
    return there == MAP_FAILED || mprotect(there, 4096, PROT_READ | PROT_EXEC) != 0 ? -1 : 42;
}
static int own_code(const char *path) {
    (void)path;
    unsigned char *code = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (code == MAP_FAILED) return -1;
    memcpy(code, (unsigned char[]){ 0xb8, 42, 0, 0, 0, 0xc3 }, 6); /* mov eax, 42; ret */
    if (mprotect(code, 4096, PROT_READ | PROT_EXEC) != 0) return -1;
    return ((int (*)(void))code)();
}
/* Executes a name that somebody else turns now to one file, now to the other: 43 once the unlisted one ran. */
static int swapped(const char *link) {
    char other[520];
    snprintf(other, sizeof other, "%s.new", link);
    pid_t parent = getpid(), turner = fork();
    if (turner == 0) {
        const char *listed = in(root, "bin/tool"), *unlisted = in(root, "opt/unlisted");
        while (getppid() == parent) {
            if (symlink(unlisted, other) == 0) rename(other, link);
            if (symlink(listed, other) == 0) rename(other, link);
        }
        _exit(0);
    }
    int ran = 0, error = 0;
    for (int round = 0; round < 200 && ran != 43; round++) {
        int now, code = tried(plain, link, &now);
        if (code == 43) ran = 43;
        else if (now) error = now;
    }
    kill(turner, SIGKILL);
    waitpid(turner, NULL, 0);
    errno = error;
    return ran ? ran : -1;
}

int main(int argc, char **argv) {
    /* Also as the interpreter of a script, whose name comes as an argument. */
    if (argc < 3) return CODE;
    root = argv[1];
    scratch = argv[2];
    const char *tool = strdup(in(root, "bin/tool")), *unlisted = strdup(in(root, "opt/unlisted"));
    row("listed", plain, tool, 42);
    row("listed by sh -c", shell, tool, 42);
    row("listed script", plain, in(root, "bin/script"), 42);
    row("listed dynamic program", plain, in(root, "bin/dynamic"), 42);
    row("unlisted", plain, unlisted, 43);
    row("unlisted by hard link", plain, in(root, "opt/second-name"), 43);
    symlink(unlisted, in(scratch, "link"));
    row("unlisted by symbolic link", plain, in(scratch, "link"), 43);
    row("unlisted by sh -c", shell, unlisted, 43);
    row("unlisted by execveat of a descriptor", by_descriptor, unlisted, 43);
    row("unlisted by /proc/self/fd", by_proc, unlisted, 43);
    row("unlisted by memfd_create and fexecve", by_memfd, unlisted, 43);
    row("unlisted while its name is swapped", swapped, in(scratch, "swapped"), 43);
    row("listed script of an unlisted interpreter", plain, in(root, "bin/script-of-unlisted"), 43);
    row("listed program of an unlisted loader", plain, in(root, "bin/dynamic-of-unlisted"), 42);

    copy(tool, in(scratch, "copy"), 0700);
    row("copy on /workspace", plain, in(scratch, "copy"), 42);
    link(in(scratch, "copy"), in(scratch, "hard"));
    row("copy on /workspace by hard link", plain, in(scratch, "hard"), 42);
    row("copy on /workspace by sh -c", shell, in(scratch, "hard"), 42);
    rename(in(scratch, "hard"), in(scratch, "renamed"));
    row("copy on /workspace, renamed", plain, in(scratch, "renamed"), 42);
    copy(unlisted, in(scratch, "new"), 0700);
    row("new program on /workspace", plain, in(scratch, "new"), 43);
    row("new program on /workspace by a descriptor", by_descriptor, in(scratch, "new"), 43);
    row("new program on /workspace without a name", by_tmpfile, unlisted, 43);
    text(in(scratch, "script"), "#!/bin/sh\nexit 42\n");
    row("script on /workspace", plain, in(scratch, "script"), 42);
    row("script on /workspace read by sh", read_by_shell, in(scratch, "script"), 42);
    copy(in(root, "bin/dynamic"), in(scratch, "dynamic"), 0700);
    row("ld.so of a program on /workspace", by_loader, in(scratch, "dynamic"), 42);
    row("ld.so of an unlisted program", by_loader, in(root, "opt/dynamic"), 43);
    copy(in(root, "opt/library.so"), in(scratch, "library.so"), 0700);
    row("LD_PRELOAD from /workspace", preloaded, in(scratch, "library.so"), 43);
    row("LD_PRELOAD of an unlisted library", preloaded, in(root, "opt/library.so"), 43);
    row("mmap of /workspace as code", mapped, in(scratch, "new"), 42);
    row("mprotect of /workspace to code", protected, in(scratch, "new"), 42);
    row("code made in memory", own_code, NULL, 42);

    static const char *names[] = { "/tmp", "/dev/shm", "/run/lock" };
    for (int at = 3; at < argc && at < 6; at++) {
        char name[64];
        copy(unlisted, in(argv[at], "new"), 0700);
        snprintf(name, sizeof name, "new program on %s", names[at - 3]);
        row(name, plain, in(argv[at], "new"), 43);
        snprintf(name, sizeof name, "mmap of %s as code", names[at - 3]);
        row(name, mapped, in(argv[at], "new"), 42);
    }
    return 0;
}
#endif
