/* An accomplice of the workload: for tests alone, in an initramfs that only they build.
 *
 * It stands for a guest whose kernel was taken over. As /init it forks before Hotcell's own
 * init (here /hotcell-init) gives anything up, and so keeps a process with every capability.
 * That process waits for an order in a file that the workload can write, and obeys:
 *
 *   load      loads /attack.ko
 *   unload    unloads it; its exit function changes kernel text or the interrupt table
 *   remount   makes the root's mount writable
 *   hide      takes the workload's process "sleep 1234" out of the cgroup that the init finds its processes by
 *   rebind    mounts the root read-only again, as it is
 *   tun       makes a network device, where the kernel has the driver loaded
 *   agent     becomes a process of the root image as the workload's user
 *   root      becomes a process of the root image with user 0
 *   stop      stops PID 1: it neither speaks nor reads any more
 *   half      stops PID 1, and says half a frame in its name
 *   rubbish   says what is no frame in PID 1's name, without end
 *   die       makes PID 1 execute what is no code
 *   mount     mounts a tmpfs on the workload's /tmp/made
 *   executable  lets files on the workload's /tmp be executed
 *   namespace starts a process in a host name namespace of its own
 *
 * "timed ORDER" tells its wall clock sixty times through the fifo /tmp/say, then the nanosecond
 * at which it will obey, 300 ms ahead, so that the workload has the time to pass it on.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void say(const char *what, long result) {
    char line[128];
    int length = snprintf(line, sizeof line, "accomplice: %s %ld %s\n", what, result, result < 0 ? strerror(errno) : "");
    int console = open("/dev/console", O_WRONLY | O_NOCTTY);
    if (console >= 0) {
        if (write(console, line, length) < 0) return;
        close(console);
    }
}

static long long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Holds PID 1 where it is. */
static long stop_init(void) {
    int status;
    if (ptrace(PTRACE_SEIZE, 1, 0, 0) < 0) return -1;
    if (ptrace(PTRACE_INTERRUPT, 1, 0, 0) < 0) return -1;
    return waitpid(1, &status, __WALL);
}

/* PID 1's end of the channel to the host. */
static int channel(void) {
    DIR *list = opendir("/proc/1/fd");
    struct dirent *entry;
    while (list && (entry = readdir(list))) {
        char path[300], target[64] = {0};
        snprintf(path, sizeof path, "/proc/1/fd/%s", entry->d_name);
        if (readlink(path, target, sizeof target - 1) > 0 && strstr(target, "/vport"))
            return syscall(SYS_pidfd_getfd, syscall(SYS_pidfd_open, 1, 0), atoi(entry->d_name), 0);
    }
    return -1;
}

static void speak(const char *order) {
    static char bytes[1 << 16];
    int port = channel();
    if (!strcmp(order, "half")) {
        /* A log line of a thousand bytes, cut within its length. */
        long held = stop_init();
        long said = write(port, "HC\1\x4c\0\0\0\0\0\0\0\0\xe8", 13);
        say(order, held < 0 ? held : said);
        return;
    }
    memset(bytes, 0x48, sizeof bytes);
    say(order, write(port, bytes, sizeof bytes));
    for (;;)
        if (write(port, bytes, sizeof bytes) < 0) usleep(1000);
}

static void die(void) {
    struct user_regs_struct registers;
    long held = stop_init();
    if (held > 0) held = ptrace(PTRACE_GETREGS, 1, 0, &registers);
    registers.rip = 0;
    if (held == 0) held = ptrace(PTRACE_SETREGS, 1, 0, &registers);
    if (held == 0) held = ptrace(PTRACE_DETACH, 1, 0, 0);
    say("die", held);
}

static int view_of_reaper(void) {
    for (int pid = 2; pid < 1000; pid++) {
        char path[64], name[32] = {0};
        snprintf(path, sizeof path, "/proc/%d/comm", pid);
        int file = open(path, O_RDONLY);
        if (file < 0) continue;
        ssize_t length = read(file, name, sizeof name - 1);
        close(file);
        if (length <= 0 || strcmp(name, "hotcell-reaper\n")) continue;
        snprintf(path, sizeof path, "/proc/%d/ns/mnt", pid);
        return open(path, O_RDONLY);
    }
    return -1;
}

static void obey(const char *order) {
    if (!strncmp(order, "timed ", 6)) {
        int told = open("/root/tmp/say", O_WRONLY);
        if (told < 0) return say(order, -1);
        struct timespec pause = {0, 5000000};
        for (int round = 0; round < 60; round++) {
            dprintf(told, "clock %lld\n", now_ns());
            nanosleep(&pause, NULL);
        }
        long long due = now_ns() + 300000000LL;
        dprintf(told, "due %lld\n", due);
        struct timespec until = {due / 1000000000LL, due % 1000000000LL};
        clock_nanosleep(CLOCK_REALTIME, TIMER_ABSTIME, &until, NULL);
        order += 6;
    }
    if (!strcmp(order, "mount") || !strcmp(order, "executable") || !strcmp(order, "namespace")) {
        int made = !strcmp(order, "mount"), own = !strcmp(order, "namespace");
        if (fork() == 0) {
            /* The workload's mounts are those of the reaper, the second process that the init started. */
            int view = own ? -1 : view_of_reaper();
            if (own) say(order, unshare(CLONE_NEWUTS));
            else if (setns(view, CLONE_NEWNS) < 0) say("setns", -1);
            else if (made) say(order, mkdir("/tmp/made", 0755) || mount("none", "/tmp/made", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) ? -1 : 0);
            else say(order, mount("none", "/tmp", NULL, MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV, NULL));
            if (own) for (;;) pause();
            _exit(0);
        }
    } else if (!strcmp(order, "load")) {
        int file = open("/attack.ko", O_RDONLY);
        say(order, syscall(SYS_finit_module, file, "", 0));
    } else if (!strcmp(order, "unload")) {
        say(order, syscall(SYS_delete_module, "hotcell_attack", O_NONBLOCK));
    } else if (!strcmp(order, "remount")) {
        say(order, mount("none", "/root", NULL, MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV, NULL));
    } else if (!strcmp(order, "rebind")) {
        say(order, mount("none", "/root", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, NULL));
    } else if (!strcmp(order, "tun")) {
        struct ifreq device = {0};
        strcpy(device.ifr_name, "wire0");
        device.ifr_flags = IFF_TUN | IFF_NO_PI;
        /* Left open: the device lives as long as it. */
        say(order, ioctl(open("/dev/net/tun", O_RDWR), TUNSETIFF, &device));
    } else if (!strcmp(order, "hide")) {
        DIR *all = opendir("/proc");
        for (struct dirent *one; all && (one = readdir(all));) {
            char path[300], line[64] = {0};
            snprintf(path, sizeof path, "/proc/%s/cmdline", one->d_name);
            int file = open(path, O_RDONLY);
            if (file < 0) continue;
            ssize_t length = read(file, line, sizeof line - 1);
            close(file);
            if (length < 11 || memcmp(line, "sleep\0001234", 11)) continue;
            FILE *procs = fopen("/cgroup/cgroup.procs", "w");
            if (!procs) return;
            fprintf(procs, "%s\n", one->d_name);
            say(order, fclose(procs));
        }
        if (all) closedir(all);
    } else if (!strcmp(order, "root") || !strcmp(order, "agent")) {
        if (fork() == 0) {
            if (*order == 'a' && (setgroups(0, NULL) || chdir("/root") || chroot("/root") || setgid(1000) || setuid(1000))) _exit(1);
            if (*order == 'a') execl("/bin/busybox", "sleep", "1000", NULL);
            if (chroot("/root") == 0) execl("/bin/busybox", "sleep", "1000", NULL);
            say(order, -1);
            _exit(1);
        }
        say(order, 0);
    } else if (!strcmp(order, "stop")) {
        say(order, stop_init());
    } else if (!strcmp(order, "half") || !strcmp(order, "rubbish")) {
        speak(order);
    } else if (!strcmp(order, "die")) {
        die();
    } else {
        say("unknown order", 0);
    }
}

int main(int argc, char **argv, char **environment) {
    (void)argc;
    if (fork() != 0) {
        execve("/hotcell-init", argv, environment);
        return 1;
    }
    for (;;) {
        struct timespec pause = {0, 1000000};
        nanosleep(&pause, NULL);
        int file = open("/root/tmp/order", O_RDONLY);
        if (file < 0) continue;
        char order[32] = {0};
        ssize_t length = read(file, order, sizeof order - 1);
        close(file);
        /* Written whole once it ends in a newline. */
        if (length < 2 || order[length - 1] != '\n') continue;
        unlink("/root/tmp/order");
        order[length - 1] = 0;
        obey(order);
    }
}
