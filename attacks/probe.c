/* Tries, one by one, what a workload must not be able to do, and says of each what came of it:
 *
 *     NAME: refused ERRNO      the wall held
 *     NAME: reached [ERRNO]    the call got past the wall (ERRNO: it then failed on its own arguments)
 *
 * Each attempt runs in a child of its own, so that one that succeeds does not change the next. Arguments are
 * such that an attempt that gets through does no harm to the machine it runs on: the same program runs as the
 * control on a host without the walls. Built static, without anything but libc.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/vm_sockets.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/personality.h>
#include <sys/ptrace.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *scratch = "/tmp";

struct outcome { long result; int error; };

/* Runs the attempt in a child; what it gave comes back through a pipe. */
static struct outcome attempt(long (*try)(void)) {
    struct outcome outcome = { -1, ECHILD };
    int ends[2];
    if (pipe(ends) != 0) return outcome;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        errno = 0;
        struct outcome mine;
        mine.result = try();
        mine.error = errno;
        ssize_t sent = write(ends[1], &mine, sizeof mine);
        _exit(sent == sizeof mine ? 0 : 1);
    }
    close(ends[1]);
    if (child > 0) {
        if (read(ends[0], &outcome, sizeof outcome) != sizeof outcome) outcome.error = ECONNABORTED;
        waitpid(child, NULL, 0);
    }
    close(ends[0]);
    return outcome;
}

static void say(const char *name, int reached, int error) {
    const char *text = error ? strerrorname_np(error) : NULL;
    printf("%s: %s%s%s\n", name, reached ? "reached" : "refused", text ? " " : "", text ? text : "");
    fflush(stdout);
}

/* A call that asks for a right: only an answer about the right is a refusal. */
static void gate(const char *name, long (*try)(void)) {
    struct outcome o = attempt(try);
    int refused = o.result < 0 && (o.error == EPERM || o.error == EACCES || o.error == ENOSYS ||
                                   o.error == EAFNOSUPPORT || o.error == EROFS || o.error == ECONNABORTED);
    say(name, !refused, o.result < 0 ? o.error : 0);
}

/* A door that is open or not: any failure is a refusal. */
static void door(const char *name, long (*try)(void)) {
    struct outcome o = attempt(try);
    say(name, o.result >= 0, o.result < 0 ? o.error : 0);
}

static const char *path;
static int flags;
static long try_open(void) { return open(path, flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); }
static void file(const char *name, const char *where, int how) {
    path = where;
    flags = how;
    door(name, try_open);
}

/* ---- privileges ---- */

static long try_mount(void) {
    long done = mount("none", scratch, "tmpfs", 0, "size=4k");
    int error = errno;
    if (done == 0) umount2(scratch, MNT_DETACH);
    errno = error;
    return done;
}
static long try_umount(void) { return umount2("/nonexistent", 0); }
static long try_pivot(void) { return syscall(SYS_pivot_root, "/nonexistent", "/nonexistent"); }
static long try_chroot(void) { return chroot(scratch); }
static long try_fsopen(void) { return syscall(SYS_fsopen, "tmpfs", 0); }
static long try_userns(void) { return unshare(CLONE_NEWUSER); }
static long try_netns(void) { return unshare(CLONE_NEWNET); }
static long try_clone_userns(void) {
    long child = syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, NULL, NULL, NULL, NULL);
    if (child == 0) _exit(0);
    if (child > 0) waitpid(child, NULL, 0);
    return child;
}
static long try_setns(void) { return setns(open("/proc/self/ns/uts", O_RDONLY), CLONE_NEWUTS); }
static long try_trace(void) {
    pid_t other = fork();
    if (other == 0) { pause(); _exit(0); }
    long done = ptrace(PTRACE_ATTACH, other, 0, 0);
    int error = errno;
    if (done == 0) waitpid(other, NULL, __WALL);
    kill(other, SIGKILL);
    errno = error;
    return done;
}
static long try_read_memory(void) {
    static char secret[16] = "secret";
    char copy[16];
    pid_t other = fork();
    if (other == 0) { pause(); _exit(0); }
    struct iovec here = { copy, sizeof copy }, there = { secret, sizeof secret };
    long done = process_vm_readv(other, &here, 1, &there, 1, 0);
    int error = errno;
    kill(other, SIGKILL);
    errno = error;
    return done;
}
static long try_getfd(void) {
    pid_t other = fork();
    if (other == 0) { pause(); _exit(0); }
    long pidfd = syscall(SYS_pidfd_open, other, 0);
    long done = syscall(SYS_pidfd_getfd, pidfd, 1, 0);
    int error = errno;
    kill(other, SIGKILL);
    errno = error;
    return done;
}
static long try_bpf(void) { return syscall(SYS_bpf, 9999, NULL, 0); }
static long try_perf(void) { return syscall(SYS_perf_event_open, NULL, 0, -1, -1, 0); }
static long try_kexec(void) { return syscall(SYS_kexec_load, 0, 4096, NULL, 0); }
static long try_init_module(void) { return syscall(SYS_init_module, NULL, 0, ""); }
static long try_finit_module(void) { return syscall(SYS_finit_module, -1, "", 0); }
static long try_delete_module(void) { return syscall(SYS_delete_module, "hotcell_none", O_NONBLOCK); }
static long try_keyctl(void) { return syscall(SYS_keyctl, 0, -3, 1); }
static long try_add_key(void) { return syscall(SYS_add_key, "user", "hotcell-probe", "x", 1, -2); }
static long try_userfaultfd(void) { return syscall(SYS_userfaultfd, 1); }
static long try_io_uring(void) { return syscall(SYS_io_uring_setup, 0, NULL); }
static long try_memfd(void) { return syscall(SYS_memfd_create, "probe", 0); }
static long try_handle(void) { return syscall(SYS_open_by_handle_at, -1, NULL, 0); }
static long try_fanotify(void) { return syscall(SYS_fanotify_init, 0, 0); }
static long try_reboot(void) { return syscall(SYS_reboot, 0, 0, 0, NULL); }
static long try_hostname(void) { return syscall(SYS_sethostname, "x", 65); }
static long try_settime(void) { return syscall(SYS_settimeofday, NULL, (void *)1); }
static long try_iopl(void) { return syscall(SYS_iopl, 3); }
static long try_swapon(void) { return syscall(SYS_swapon, "/nonexistent", 0); }
static long try_dmesg(void) { return syscall(SYS_syslog, 10, NULL, 0); }
static long try_mknod(void) {
    char name[256];
    snprintf(name, sizeof name, "%s/hotcell-probe-disk", scratch);
    long done = mknod(name, S_IFBLK | 0600, makedev(254, 0));
    int error = errno;
    if (done == 0) unlink(name);
    errno = error;
    return done;
}
static long try_setuid(void) { return setuid(0); }
static long try_setgroups(void) { gid_t none = 0; return setgroups(1, &none); }
static long try_raw(void) { return socket(AF_INET, SOCK_RAW, IPPROTO_ICMP); }
static long try_packet(void) { return socket(AF_PACKET, SOCK_RAW, 0); }
static long try_priority(void) { return setpriority(PRIO_PROCESS, 0, -20); }
static long try_exec_personality(void) { return personality(READ_IMPLIES_EXEC); }
static long try_ldt(void) { return syscall(SYS_modify_ldt, 0, NULL, 0); }
static long try_signal_init(void) { return kill(1, 0); }
static long try_raise_files(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return -1;
    limit.rlim_max += 1;
    return setrlimit(RLIMIT_NOFILE, &limit);
}
/* Device nodes that lead anywhere: disks, ports, consoles, memory. */
static long try_devices(void) {
    DIR *dir = opendir("/dev");
    struct dirent *entry;
    if (!dir) return -1;
    while ((entry = readdir(dir))) {
        struct stat info;
        if (fstatat(dirfd(dir), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0) continue;
        int harmless = S_ISCHR(info.st_mode) && major(info.st_rdev) == 1 && minor(info.st_rdev) != 1 &&
                       minor(info.st_rdev) != 2 && minor(info.st_rdev) != 4 && minor(info.st_rdev) != 11;
        int tty = S_ISCHR(info.st_mode) && (info.st_rdev == makedev(5, 0) || info.st_rdev == makedev(5, 2));
        if ((S_ISBLK(info.st_mode) || S_ISCHR(info.st_mode)) && !harmless && !tty) return 0;
    }
    errno = ENODEV;
    return -1;
}

static void privileges(void) {
    gate("mount", try_mount);
    gate("umount", try_umount);
    gate("pivot-root", try_pivot);
    gate("chroot", try_chroot);
    gate("fsopen", try_fsopen);
    gate("user-namespace", try_userns);
    gate("network-namespace", try_netns);
    gate("clone-user-namespace", try_clone_userns);
    gate("setns", try_setns);
    gate("ptrace-another", try_trace);
    gate("read-others-memory", try_read_memory);
    gate("take-others-file", try_getfd);
    gate("bpf", try_bpf);
    gate("perf-event", try_perf);
    gate("kexec", try_kexec);
    gate("init-module", try_init_module);
    gate("finit-module", try_finit_module);
    gate("delete-module", try_delete_module);
    gate("keyctl", try_keyctl);
    gate("add-key", try_add_key);
    gate("userfaultfd", try_userfaultfd);
    gate("io-uring", try_io_uring);
    gate("memfd", try_memfd);
    gate("open-by-handle", try_handle);
    gate("fanotify", try_fanotify);
    gate("reboot", try_reboot);
    gate("set-host-name", try_hostname);
    gate("set-clock", try_settime);
    gate("port-access", try_iopl);
    gate("swapon", try_swapon);
    gate("kernel-log", try_dmesg);
    gate("make-device", try_mknod);
    gate("setuid", try_setuid);
    gate("setgroups", try_setgroups);
    gate("raw-socket", try_raw);
    gate("packet-socket", try_packet);
    gate("raise-priority", try_priority);
    gate("raise-file-limit", try_raise_files);
    gate("executable-data", try_exec_personality);
    gate("local-descriptors", try_ldt);
    gate("signal-init", try_signal_init);
    door("device-nodes", try_devices);
    file("kernel-core", "/proc/kcore", O_RDONLY);
    file("physical-memory", "/dev/mem", O_RDONLY);
    file("io-ports", "/dev/port", O_RDONLY);
    file("kernel-messages", "/dev/kmsg", O_RDONLY);
    file("root-disk", "/dev/vda", O_RDONLY);
    file("workspace-disk", "/dev/vdb", O_RDWR);
    file("channel-port", "/dev/vport1p1", O_RDWR);
    file("channel-port-0", "/dev/vport0p1", O_RDWR);
    file("serial-console", "/dev/ttyS0", O_RDWR);
    file("hypervisor-console", "/dev/hvc0", O_RDWR);
    file("init-memory", "/proc/1/mem", O_RDWR);
    file("init-root", "/proc/1/root/", O_RDONLY | O_DIRECTORY);
    file("init-environment", "/proc/1/environ", O_RDONLY);
    file("system-request", "/proc/sysrq-trigger", O_WRONLY);
    file("core-pattern", "/proc/sys/kernel/core_pattern", O_WRONLY);
    file("kernel-settings", "/sys/kernel/uevent_helper", O_WRONLY);
    file("fuse", "/dev/fuse", O_RDWR);
    file("kvm", "/dev/kvm", O_RDWR);
}

/* ---- network ---- */

static const char *address;
static int port, kind;

static long try_ip(void) {
    struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(port) };
    inet_pton(AF_INET, address, &to.sin_addr);
    int s = socket(AF_INET, kind | SOCK_NONBLOCK, 0);
    if (s < 0) return -1;
    if (kind == SOCK_DGRAM) return sendto(s, "x", 1, 0, (struct sockaddr *)&to, sizeof to);
    if (connect(s, (struct sockaddr *)&to, sizeof to) == 0) return 0;
    /* Under way: it left this machine, or found a listener on it. */
    if (errno == EINPROGRESS) { errno = 0; return 0; }
    return -1;
}
static long try_tcp_wait(void) {
    struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(port) };
    inet_pton(AF_INET, address, &to.sin_addr);
    int s = socket(AF_INET, SOCK_STREAM, 0);
    return s < 0 ? -1 : connect(s, (struct sockaddr *)&to, sizeof to);
}
static void ip(const char *name, const char *where, int number, int how) {
    address = where;
    port = number;
    kind = how;
    door(name, try_ip);
}
static long try_ip6(void) {
    struct sockaddr_in6 to = { .sin6_family = AF_INET6, .sin6_port = htons(53) };
    inet_pton(AF_INET6, "2001:db8::1", &to.sin6_addr);
    int s = socket(AF_INET6, SOCK_DGRAM, 0);
    return s < 0 ? -1 : sendto(s, "x", 1, 0, (struct sockaddr *)&to, sizeof to);
}
static long try_broadcast(void) {
    struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(67) };
    int one = 1, s = socket(AF_INET, SOCK_DGRAM, 0);
    to.sin_addr.s_addr = INADDR_BROADCAST;
    if (s < 0 || setsockopt(s, SOL_SOCKET, SO_BROADCAST, &one, sizeof one) != 0) return -1;
    return sendto(s, "x", 1, 0, (struct sockaddr *)&to, sizeof to);
}
static long try_ping(void) {
    struct sockaddr_in to = { .sin_family = AF_INET };
    unsigned char echo[8] = { 8 };
    inet_pton(AF_INET, "192.0.2.1", &to.sin_addr);
    int s = socket(AF_INET, SOCK_DGRAM, IPPROTO_ICMP);
    return s < 0 ? -1 : sendto(s, echo, sizeof echo, 0, (struct sockaddr *)&to, sizeof to);
}
static unsigned cid;
static long try_vsock(void) {
    struct sockaddr_vm to = { .svm_family = AF_VSOCK, .svm_cid = cid, .svm_port = 1024 };
    int s = socket(AF_VSOCK, SOCK_STREAM, 0);
    return s < 0 ? -1 : connect(s, (struct sockaddr *)&to, sizeof to);
}
static int family;
static long try_family(void) { return socket(family, family == 38 ? SOCK_SEQPACKET : SOCK_RAW, 0); }
static long try_vsock_socket(void) { return socket(AF_VSOCK, SOCK_STREAM, 0); }
static const char *abstract;
static long try_host_unix(void) {
    struct sockaddr_un to = { .sun_family = AF_UNIX };
    snprintf(to.sun_path + 1, sizeof to.sun_path - 1, "%s", abstract);
    int s = socket(AF_UNIX, SOCK_STREAM, 0);
    return s < 0 ? -1 : connect(s, (struct sockaddr *)&to, offsetof(struct sockaddr_un, sun_path) + 1 + strlen(abstract));
}
static long try_interfaces(void) {
    struct if_nameindex *all = if_nameindex();
    if (!all) return -1;
    for (struct if_nameindex *i = all; i->if_index; i++)
        if (strcmp(i->if_name, "lo") != 0) return 0;
    errno = ENODEV;
    return -1;
}
static long try_address(void) {
    struct ifreq request = { 0 };
    strcpy(request.ifr_name, "lo");
    struct sockaddr_in *address = (struct sockaddr_in *)&request.ifr_addr;
    int s = socket(AF_INET, SOCK_DGRAM, 0);
    if (s < 0 || ioctl(s, SIOCGIFADDR, &request) != 0) return -1;
    /* Sets the address that it has already. */
    (void)address;
    return ioctl(s, SIOCSIFADDR, &request);
}
static long try_own_loopback(void) {
    struct sockaddr_in to = { .sin_family = AF_INET };
    socklen_t size = sizeof to;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int listener = socket(AF_INET, SOCK_STREAM, 0), s = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&to, sizeof to) != 0 || listen(listener, 1) != 0) return -1;
    if (getsockname(listener, (struct sockaddr *)&to, &size) != 0) return -1;
    return connect(s, (struct sockaddr *)&to, sizeof to);
}

static void network(int host_port, const char *host_socket) {
    door("other-interfaces", try_interfaces);
    ip("dns", "192.0.2.53", 53, SOCK_DGRAM);
    ip("dns-tcp", "198.51.100.53", 53, SOCK_STREAM);
    ip("https", "203.0.113.1", 443, SOCK_STREAM);
    ip("private-network", "10.0.0.1", 22, SOCK_STREAM);
    ip("qemu-user-gateway", "10.0.2.2", 80, SOCK_STREAM);
    ip("metadata", "169.254.169.254", 80, SOCK_STREAM);
    ip("metadata-udp", "169.254.169.254", 53, SOCK_DGRAM);
    ip("multicast", "224.0.0.251", 5353, SOCK_DGRAM);
    door("broadcast", try_broadcast);
    door("ipv6", try_ip6);
    door("ping", try_ping);
    gate("raw-socket", try_raw);
    gate("packet-socket", try_packet);
    gate("vsock-socket", try_vsock_socket);
    unsigned cids[] = { 0, 1, 2, 3, VMADDR_CID_ANY };
    for (unsigned i = 0; i < sizeof cids / sizeof *cids; i++) {
        char name[32];
        snprintf(name, sizeof name, "vsock-%u", cids[i]);
        cid = cids[i];
        door(name, try_vsock);
    }
    static const struct { const char *name; int family; } families[] = {
        { "alg", 38 }, { "bluetooth", 31 }, { "can", 29 }, { "tipc", 30 }, { "xdp", 44 }, { "smc", 43 }, { "qipcrtr", 42 },
    };
    for (unsigned i = 0; i < sizeof families / sizeof *families; i++) {
        char name[32];
        snprintf(name, sizeof name, "family-%s", families[i].name);
        family = families[i].family;
        door(name, try_family);
    }
    gate("set-address", try_address);
    file("tun", "/dev/net/tun", O_RDWR);
    address = "127.0.0.1";
    port = host_port;
    door("host-loopback", try_tcp_wait);
    abstract = host_socket;
    door("host-unix-socket", try_host_unix);
    door("own-loopback", try_own_loopback);
}

/* ---- the request socket ---- */

static int request_socket(void) {
    struct sockaddr_un to = { .sun_family = AF_UNIX, .sun_path = "/run/hotcell/request" };
    int s = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    if (s < 0 || connect(s, (struct sockaddr *)&to, sizeof to) != 0) return -1;
    return s;
}
static size_t head(unsigned char *out, int kind, uint32_t length) {
    memset(out, 0, 16);
    memcpy(out, "HC\1", 3);
    out[3] = kind;
    memcpy(out + 12, &length, 4);
    return 16;
}
static size_t claim(unsigned char *out, int kind, uint64_t subject, int32_t value, const char *text) {
    size_t at = head(out, 0x49, 24 + strlen(text));
    memset(out + at, 0, 24);
    out[at] = kind;
    memcpy(out + at + 4, &value, 4);
    memcpy(out + at + 8, &subject, 8);
    memcpy(out + at + 24, text, strlen(text));
    return at + 24 + strlen(text);
}
static size_t request(unsigned char *out, int capability, const char *resource) {
    uint32_t length = strlen(resource);
    size_t at = head(out, 0x48, 12 + length);
    memset(out + at, 0, 12);
    out[at + 4] = capability;
    memcpy(out + at + 8, &length, 4);
    memcpy(out + at + 12, resource, length);
    return at + 12 + length;
}

/* So many messages one after the other, each answered before the next. */
static int flood(int is_claim, long count) {
    unsigned char message[4096], answer[4096];
    long answered = 0;
    int s = request_socket();
    for (long i = 0; s >= 0 && i < count; i++) {
        char text[64];
        snprintf(text, sizeof text, is_claim ? "story %ld" : "/workspace/flood", i);
        /* Every other claim is a forgery: the end of an exec, by the guest. */
        size_t length = !is_claim ? request(message, 3, text)
                      : i % 2     ? claim(message, 4, 0, 0, text)
                                  : claim(message, 2, 1, 0, text);
        if (send(s, message, length, MSG_NOSIGNAL) < 0) break;
        if (recv(s, answer, sizeof answer, 0) <= 0) break;
        answered++;
    }
    printf("answered: %ld\n", answered);
    return answered == count ? 0 : 1;
}

/* Everything but a well-formed message, and connections that never say anything. */
static int rubbish(void) {
    static unsigned char huge[200000];
    unsigned char message[8192], answer[4096];
    int silent[64], said = 0;
    for (int i = 0; i < 64; i++) silent[i] = request_socket();
    for (int i = 0; i < 10; i++) {
        int s = request_socket();
        size_t length = request(message, 3, "/workspace/x");
        switch (i) {
            case 0: memset(message, 0xff, sizeof message); length = sizeof message; break;
            case 1: length = 1; break;
            case 2: length = 15; break;
            case 3: message[3] = 0x4a; length = 16; memset(message + 12, 0, 4); break;          /* "quiesced" */
            case 4: message[3] = 0x41; break;                                                   /* "exec ended" */
            case 5: memset(message + 12, 0xff, 4); break;                                       /* a length that lies */
            case 6: memset(message + 24, 0xff, 4); break;                                       /* an inner length that lies */
            case 7: message[2] = 9; break;                                                      /* another version */
            case 8: message[3] = 0x05; break;                                                   /* a frame of the host */
            case 9: length = sizeof huge; break;
        }
        const void *bytes = i == 9 ? (void *)huge : (void *)message;
        if (send(s, bytes, length, MSG_NOSIGNAL) >= 0 && recv(s, answer, sizeof answer, 0) > 0) said++;
        close(s);
    }
    printf("rubbish answered with a reason: %s\n", said >= 8 ? "yes" : "no");
    int s = request_socket();
    size_t length = request(message, 3, "/workspace/honest");
    if (send(s, message, length, MSG_NOSIGNAL) < 0 || recv(s, answer, sizeof answer, 0) <= 16) return 1;
    printf("an honest request is still answered\n");
    for (int i = 0; i < 64; i++) close(silent[i]);
    return 0;
}

/* Asks, and is gone before the init can tell of the answer in its name. */
static int conceal(void) {
    unsigned char message[4096];
    for (int i = 0; i < 8; i++) {
        int s = request_socket();
        send(s, message, request(message, 3, "/workspace/secret"), MSG_NOSIGNAL);
    }
    kill(0, SIGKILL);
    return 1;
}

/* Forks that stay, until no more come. */
static int crowd(long wanted) {
    long made = 0;
    for (; made < wanted; made++) {
        pid_t child = fork();
        if (child < 0) break;
        if (child == 0) { pause(); _exit(0); }
    }
    printf("processes: %s\n", made == wanted ? "all" : made < 300 ? "stopped below 300" : "stopped");
    return 0;
}

static long try_random(void) {
    char bytes[64];
    return getrandom(bytes, sizeof bytes, GRND_NONBLOCK);
}

int main(int count, char **words) {
    const char *what = count > 1 ? words[1] : "";
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (getenv("PROBE_SCRATCH")) scratch = getenv("PROBE_SCRATCH");
    if (!strcmp(what, "privileges")) return privileges(), 0;
    if (!strcmp(what, "network") && count == 4) return network(atoi(words[2]), words[3]), 0;
    if (!strcmp(what, "claims") && count == 3) return flood(1, atol(words[2]));
    if (!strcmp(what, "requests") && count == 3) return flood(0, atol(words[2]));
    if (!strcmp(what, "rubbish")) return rubbish();
    if (!strcmp(what, "conceal")) return conceal();
    if (!strcmp(what, "random")) return door("random-without-waiting", try_random), 0;
    if (!strcmp(what, "crowd") && count == 3) return crowd(atol(words[2]));
    fprintf(stderr, "probe: privileges | network PORT SOCKET | claims N | requests N | rubbish | conceal | random | crowd N\n");
    return 2;
}
