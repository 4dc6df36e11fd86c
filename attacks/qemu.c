/* A VMM that lies about the root image: for tests alone, in place of QEMU.
 *
 * It executes the real QEMU with other arguments, by what it is called:
 *
 *   qemu-honest    the same arguments
 *   qemu-writable  the root image's nodes are not read-only
 *   qemu-lying     what is called root and asked about is an empty, read-only node; the guest's root disk is another node
 *                  over the same descriptor, writable
 *   qemu-device    one device more than was asked for
 *   qemu-append-X  the guest's kernel is given X as well
 *   qemu-late-*    the same arguments, and one more control channel, to a child of its own. That waits until nobody holds
 *                  a lock on the root image, which is while the command runs, and then gives orders:
 *       -reopen    hands in the root image opened for writing, and has root's nodes opened anew, writable
 *       -writes    makes another node that is no file, and writes to it
 *       -reads     reads from the root
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static char *without(const char *arg, const char *word, const char *other) {
    const char *at = strstr(arg, word);
    char *out = malloc(strlen(arg) + strlen(other) + 1);
    if (!at || !out) _exit(1);
    sprintf(out, "%.*s%s%s", (int)(at - arg), arg, other, at + strlen(word));
    return out;
}

/* One order, with a descriptor where there is one, and its answer. */
static void order(int channel, const char *text, int descriptor) {
    char space[CMSG_SPACE(sizeof(int))] = {0}, answer[1 << 16];
    struct iovec part = {(void *)text, strlen(text)};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (descriptor >= 0) {
        message.msg_control = space;
        message.msg_controllen = sizeof space;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    }
    if (sendmsg(channel, &message, 0) < 0) _exit(1);
    /* Answers and events are lines; an answer is one of two. */
    for (size_t length = 0; length < sizeof answer - 1;) {
        ssize_t some = read(channel, answer + length, sizeof answer - 1 - length);
        if (some <= 0) _exit(1);
        length += some;
        answer[length] = 0;
        if (strstr(answer, "\"return\"") || strstr(answer, "\"error\"")) return;
    }
}

static void late(const char *what, int channel, int root) {
    /* Nothing else of the VMM's is held open by this child. */
    dup2(channel, 0);
    dup2(root, 1);
    syscall(SYS_close_range, 2, ~0u, 0);
    if (flock(1, LOCK_SH) < 0) _exit(1);
    order(0, "{\"execute\":\"qmp_capabilities\"}", -1);
    if (!strcmp(what, "reopen")) {
        order(0, "{\"execute\":\"add-fd\",\"arguments\":{\"fdset-id\":1}}", 1);
        order(0, "{\"execute\":\"blockdev-reopen\",\"arguments\":{\"options\":["
                 "{\"driver\":\"file\",\"node-name\":\"root-file\",\"filename\":\"/dev/fdset/1\",\"locking\":\"off\",\"read-only\":false},"
                 "{\"driver\":\"raw\",\"node-name\":\"root\",\"file\":\"root-file\",\"read-only\":false}]}}", -1);
    } else if (!strcmp(what, "writes")) {
        order(0, "{\"execute\":\"blockdev-add\",\"arguments\":{\"driver\":\"null-co\",\"node-name\":\"other\",\"size\":65536}}", -1);
        order(0, "{\"execute\":\"human-monitor-command\",\"arguments\":{\"command-line\":\"qemu-io other \\\"write 0 512\\\"\"}}", -1);
    } else {
        order(0, "{\"execute\":\"human-monitor-command\",\"arguments\":{\"command-line\":\"qemu-io root \\\"read 0 512\\\"\"}}", -1);
    }
    _exit(0);
}

/* The number of the root image's descriptor, in "fd=N,set=1,opaque=root". */
static int root_of(int argc, char **argv) {
    for (int at = 0; at < argc; at++)
        if (!strncmp(argv[at], "fd=", 3) && strstr(argv[at], "opaque=root")) return atoi(argv[at] + 3);
    _exit(1);
}

int main(int argc, char **argv, char **environment) {
    char *append = strstr(argv[0], "qemu-append-");
    int device = strstr(argv[0], "qemu-device") != NULL;
    int lying = strstr(argv[0], "qemu-lying") != NULL, writable = strstr(argv[0], "qemu-writable") != NULL;
    const char *when = strstr(argv[0], "qemu-late-");
    char **out = calloc(argc + 9, sizeof *out), monitor[64];
    int count = 0;
    if (!out) return 1;
    for (int at = 0; at < argc; at++) {
        char *arg = argv[at];
        int of_root = strstr(arg, "node-name=root") != NULL;
        if (writable && of_root) arg = without(arg, "read-only=on", "read-only=off");
        if (lying && of_root && !strncmp(arg, "driver=file,", 12)) arg = "driver=null-co,node-name=root-file,read-only=on";
        if (lying && !strncmp(arg, "virtio-blk-device,drive=root,", 29)) {
            /* After "-device", which is taken back. */
            count--;
            out[count++] = "-blockdev";
            out[count++] = "driver=file,filename=/dev/fdset/1,node-name=evil-file,locking=off,read-only=off";
            out[count++] = "-blockdev";
            out[count++] = "driver=raw,file=evil-file,node-name=evil,read-only=off";
            out[count++] = "-device";
            arg = "virtio-blk-device,drive=evil,serial=root";
        }
        if (append && at && !strcmp(argv[at - 1], "-append")) {
            char *longer = malloc(strlen(arg) + strlen(append) + 1);
            if (!longer) return 1;
            sprintf(longer, "%s %s", arg, append + strlen("qemu-append-"));
            arg = longer;
        }
        out[count++] = arg;
    }
    if (device) {
        out[count++] = "-device";
        out[count++] = "virtio-balloon-device";
    }
    if (when) {
        int ends[2], root = root_of(argc, argv);
        char path[64];
        snprintf(path, sizeof path, "/proc/self/fd/%d", root);
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) < 0) return 1;
        if (fork() == 0) late(when + strlen("qemu-late-"), ends[1], open(path, O_RDWR));
        close(ends[1]);
        snprintf(monitor, sizeof monitor, "socket,id=late,fd=%d", ends[0]);
        out[count++] = "-chardev";
        out[count++] = monitor;
        out[count++] = "-mon";
        out[count++] = "chardev=late,mode=control";
    }
    execve("/usr/bin/qemu-system-x86_64", out, environment);
    execve("/usr/local/bin/qemu-system-x86_64", out, environment);
    return 127;
}
