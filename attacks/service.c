/* A root service with a hole, for a test image: it takes lines from /run/service and answers
 * into /run/answers. What it is for it does itself; of "log TEXT" it makes a shell command
 * without quoting the text, so whoever may write a line is root, as far as the service is. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

/* The lines of its own status that say what it may. */
static void status(FILE *to) {
    FILE *from = fopen("/proc/self/status", "r");
    char line[512];
    if (!from) return;
    while (fgets(line, sizeof line, from))
        if (!strncmp(line, "CapEff", 6) || !strncmp(line, "CapBnd", 6) || !strncmp(line, "NoNewPrivs", 10) || !strncmp(line, "Seccomp:", 8))
            fputs(line, to);
    fclose(from);
}

/* Files of the kernel's below /proc that are their owner's to write: how many the mount refuses, and which it lets. */
static long refused;
static void settings(const char *directory, int depth, FILE *to) {
    DIR *open_directory = opendir(directory);
    struct dirent *entry;
    if (!open_directory) return;
    while ((entry = readdir(open_directory))) {
        char path[1024];
        struct stat about;
        if (entry->d_name[0] == '.' || (depth == 0 && entry->d_name[0] >= '0' && entry->d_name[0] <= '9')) continue;
        snprintf(path, sizeof path, "%s/%s", directory, entry->d_name);
        if (lstat(path, &about)) continue;
        if (S_ISDIR(about.st_mode)) settings(path, depth + 1, to);
        if (!S_ISREG(about.st_mode) || !(about.st_mode & S_IWUSR)) continue;
        int file = open(path, O_WRONLY);
        if (file >= 0) fprintf(to, "MAY WRITE %s\n", path);
        else if (errno == EROFS) refused++;
        if (file >= 0) close(file);
    }
    closedir(open_directory);
}

static void answer(const char *line, FILE *to) {
    char text[600];
    if (!strncmp(line, "hello ", 6)) {
        fprintf(to, "good day, %s, says user %d\n", line + 6, (int)getuid());
    } else if (!strncmp(line, "read ", 5)) {
        FILE *from = fopen(line + 5, "r");
        if (from && fgets(text, sizeof text, from)) fputs(text, to);
        if (from) fclose(from);
    } else if (!strcmp(line, "settings")) {
        settings("/proc", 0, to);
        if (!unlink("/run/hotcell/request") || !rename("/run/hotcell", "/run/other") || !chmod("/run/hotcell/request", 0)) fprintf(to, "REPLACED\n");
        fprintf(to, "settings: %s\n", refused > 100 ? "read-only" : "hardly any");
    } else if (!strcmp(line, "harm")) {
        if (mount("none", "/mnt", "tmpfs", 0, NULL) == 0) fprintf(to, "SERVICE MOUNTED\n");
        kill(1, SIGKILL);
        fprintf(to, readlink("/proc/1/exe", text, sizeof text) < 0 ? "no look into the reaper\n" : "LOOKED\n");
    } else if (!strncmp(line, "log ", 4)) {
        snprintf(text, sizeof text, "echo %s >>/run/log", line + 4);
        fprintf(to, "logged: %d\n", system(text));
    }
    fprintf(to, "done\n");
}

int main(int argc, char **argv) {
    char line[512], here[512];
    printf("service is %d:%d with %s in %s\n", (int)getuid(), (int)getgid(), argc > 1 ? argv[1] : "nothing", getcwd(here, sizeof here));
    status(stdout);
    fflush(stdout);
    umask(0);
    if (mkfifo("/run/service", 0666) < 0) return 1;
    for (;;) {
        FILE *asked = fopen("/run/service", "r");
        if (!asked) return 1;
        while (fgets(line, sizeof line, asked)) {
            line[strcspn(line, "\n")] = 0;
            FILE *answers = fopen("/run/answers", "a");
            if (!answers) return 1;
            answer(line, answers);
            fclose(answers);
        }
        fclose(asked);
    }
}
